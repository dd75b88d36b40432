r"""Describe and check the folder of a saved model.

`CONFIG_FILE` is the manifest. It describes the model, its ranker, the other members of an
ensemble and the fitted probabilities. `Manifest` opens the files of the folder and raises an error
if a file is missing, damaged or not listed. The folder contains neither code nor pickles.

Label names and vocabularies are stored as text with one name per line. Any string is allowed as a
name, because special characters are escaped: ``\\``, ``\n``, ``\r``, and ``\uXXXX`` for other
control characters, line separators, the byte order mark and lone surrogates. All other characters
are written as UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import elias
from elias.data.atomic import digest
from elias.data.splits import DATA_SETTINGS
from elias.errors import ModelError, damaged_file, quoted
from elias.labels import LabelTable

FORMAT_VERSION = 3
"""Format version. It increases when older releases of elias-xmc cannot read the new format."""

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
LABELS_FILE = "labels.tsv"
OLD_LABELS_FILE = "labels.txt"
"""The label names of formats 1 and 2, one per line."""
LABEL_COLUMNS = ("name", "id", "synonyms", "description", "broader")
"""Columns of the label table. All columns except ``name`` are optional.

``id`` is an identifier or URI in the user's vocabulary; ``synonyms`` and ``broader`` (ids of
broader labels) are JSON arrays of strings.
"""
VOCABULARY_FILE = "vocabulary.txt"
"""Vocabulary of the bag encoder or the ranker. The words come first, then the n-grams."""
ENCODER_FOLDER = "encoder"
"""Folder with the configuration and the tokenizer of a transformer encoder."""
PROBABILITIES_FILE = "probabilities.json"
RANKER_FOLDER = "ranker"
RANKER_WEIGHTS_FILE = f"{RANKER_FOLDER}/ranker.safetensors"
FIRST_ENCODER = "first_encoder"
"""Folder of the encoder before training, which is saved if the ranker uses it."""
ADDED_FILE = "added.safetensors"
"""File of the vectors that score labels by their texts. It exists only if a label has one."""
MEMBERS_FOLDER = "members"
"""Folder of the other members of an ensemble, saved in subfolders 1, 2, …"""

COMPACT = "compact"
"""Key of the entry that is true if a model or ranker is stored in 8 and 16 bits."""
ROW_SCALE = ".row_scale"
"""Suffix of the tensor with the scales of an 8-bit matrix. There is one scale per row."""

METRICS_FILE = "metrics.jsonl"
MODEL_FOLDER = "model"
"""Subfolder of a finished run that holds its model."""

Expected = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Dtype and shape of each tensor. ``int32|int64`` allows both dtypes; None allows any size."""
Entries = Mapping[str, tuple[type, float | None]]
"""Type and minimum of each entry of a JSON object. A minimum of None means no minimum."""
_ENTRIES: Entries = {
    **dict.fromkeys(("n_labels", "n_clusters", "n_edges"), (int, 1)),
    **dict.fromkeys(("alpha", "beta"), (float, 1)),
    **dict.fromkeys(("graph_learned", "first_encoder", "probabilities"), (bool, None)),
    **dict.fromkeys(("encoder", "ranker", "config", "metadata"), (dict, None)),
    **dict.fromkeys(("data_settings", "files"), (dict, None)),
    "members": (int, 0),
    "n_added": (int, 0),
}
"""Entries of the manifest. ``n_labels`` counts the labels of the index, ``n_added`` the labels that
were added without training. ``ranker`` is empty if the model has no ranker."""
_SETTINGS: Entries = {
    **dict.fromkeys(("text", "labels", "separator", "group"), (str, None)),
    "seed": (int, 0),
    "test_size": (float, 0),
}
"""Entries of ``data_settings``, all of which are optional."""


def write_model_manifest(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write the manifest with its checksum, and the size and checksum of every other file.

    Args:
        folder: The folder of the model. All its other files must already be complete.
        tree: The other entries of the manifest, JSON-compatible.
    """
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        # each member lists its files in its own manifest; users may edit the model card
        in_member = name.startswith(f"{MEMBERS_FOLDER}/") and path.name != CONFIG_FILE
        if not path.is_file() or in_member or name in (CONFIG_FILE, CARD_FILE):
            continue
        files[name] = {"size": path.stat().st_size, "sha256": digest(path)}
        if path.suffix == ".safetensors":
            tensors = _read_tensors(path)
            files[name]["dtypes"] = {key: dtype_name(tensor) for key, tensor in tensors.items()}
    about = {"format_version": FORMAT_VERSION, "elias_version": elias.__version__}
    entries = {**about, **tree, "files": files}
    entries["sha256"] = manifest_digest(entries)
    text = json.dumps(entries, indent=2, allow_nan=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf8")


def manifest_digest(entries: Mapping[str, Any]) -> str:
    """Return the checksum of all entries of a manifest except ``sha256``."""
    others = {key: value for key, value in entries.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


class Manifest:
    """The manifest of a saved model, with methods that check and open the model's files.

    ``manifest["n_labels"]`` returns an entry. A manifest of an older format is converted to the
    current one. Older formats have no checksums.

    Raises:
        ModelError: If the manifest is missing, damaged, not saved by ELIAS, or of a newer format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / CONFIG_FILE
        if not self.path.is_file():
            if folder.is_file():
                raise ModelError(
                    f"{folder}: is a file, not the folder of a saved model; give the model first, "
                    "then texts or data"
                )
            problem = f"has no {CONFIG_FILE}" if folder.is_dir() else "no such folder"
            raise ModelError(f"{folder}: {problem}; give the folder of a saved model")
        tree = read_json(self.path, FORMAT_VERSION)
        self.is_old: bool = tree["format_version"] < FORMAT_VERSION
        self._entries = {"n_added": 0} | (_upgraded(folder, tree) if self.is_old else tree)
        check_values(self.path, self._entries, _ENTRIES)
        settings = self["data_settings"]
        present = {key: entry for key, entry in _SETTINGS.items() if key in settings}
        check_values(self.path, settings, present, "data_settings.")
        if "sha256" in tree and tree["sha256"] != manifest_digest(tree):
            raise damaged_file(self.path, "damaged: its SHA-256 checksum is wrong")

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def file(self, name: str) -> Path:
        """Check the size and checksum of a file, and return its path."""
        path = self.folder / name
        if not path.is_file():
            raise damaged_file(path, "missing")
        if self.is_old:
            return path
        entry = self["files"].get(name)
        if not isinstance(entry, dict):
            raise damaged_file(path, f"not listed in {CONFIG_FILE}")
        size, saved_size = path.stat().st_size, entry.get("size")
        if size != saved_size:
            raise damaged_file(path, f"damaged: it has {size} bytes, not {saved_size}")
        if digest(path) != entry.get("sha256"):
            raise damaged_file(path, "damaged: its SHA-256 checksum is wrong")
        return path

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file, memory-mapped.

        Matrices in 8 bits are converted to float32, in memory.
        """
        path = self.file(name)
        tensors = _read_tensors(path)
        for key in [key for key in tensors if key.endswith(ROW_SCALE)]:
            name = key.removesuffix(ROW_SCALE)
            scale, matrix = tensors.pop(key), tensors.get(name, torch.empty(0))
            dtypes_are_valid = (matrix.dtype, scale.dtype) == (torch.int8, torch.float32)
            if not dtypes_are_valid or matrix.dim() != 2 or scale.shape != matrix.shape[:1]:
                raise damaged_file(path, f"{key} does not fit an 8-bit matrix {name}")
            tensors[name] = matrix.float().mul_(scale.unsqueeze(1))
        return tensors

    def check_tensors(self, name: str, tensors: Mapping[str, Tensor], expected: Expected) -> None:
        """Raise an error if the tensors of a file differ from ``expected``, or are not finite."""
        path = self.folder / name
        for key in sorted(expected.keys() ^ tensors.keys()):
            raise damaged_file(path, f"{key} is {'not expected' if key in tensors else 'missing'}")
        for key, (dtypes, sizes) in expected.items():
            shape, dtype = tuple(tensors[key].shape), dtype_name(tensors[key])
            if len(shape) != len(sizes) or any(
                size not in (None, actual) for actual, size in zip(shape, sizes, strict=True)
            ):
                wanted = tuple("any" if size is None else size for size in sizes)
                raise damaged_file(path, f"{key} has shape {shape}, not {wanted}")
            if dtype not in dtypes.split("|"):
                raise damaged_file(path, f"{key} is {dtype}, not {dtypes}")
            if not all_finite(tensors[key]):
                raise damaged_file(path, f"{key} has a number that is not finite")


def read_json(path: Path, newest: int) -> dict[str, Any]:
    """Read a JSON object saved by ELIAS in format ``newest`` or an older one.

    Raises:
        ModelError: If the file is not valid JSON, not saved by ELIAS, or of a newer format.
    """
    if path.exists() and not path.is_file():  # reading a pipe or device may never end
        raise damaged_file(path, "not a regular file")
    try:
        tree = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = "cannot be read" if isinstance(error, OSError) else "not valid JSON"
        raise damaged_file(path, f"{problem} ({quoted(error)})") from error
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if type(version) is not int:
        raise ModelError(f"{path}: not saved by ELIAS; give the folder of a saved model")
    if version > newest:
        raise ModelError(
            f"{path}: format {version}, written by elias-xmc {tree.get('elias_version')}, is newer "
            f"than format {newest} of elias-xmc {elias.__version__}; upgrade elias-xmc"
        )
    return dict(tree)


def check_values(path: Path, tree: Mapping[str, Any], entries: Entries, prefix: str = "") -> None:
    """Raise an error if an entry is missing, has the wrong type or is below its minimum."""
    for key, (kind, minimum) in entries.items():
        value: Any = tree.get(key)
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if not is_kind or (minimum is not None and not minimum <= value < math.inf):
            raise damaged_file(path, f"{prefix}{key} is {value!r}, which is not valid")


def _upgraded(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest of format 1 or 2 to the current format, without checksums."""
    tree.setdefault("beside", {})  # format 1 stores only the model
    check_values(folder / CONFIG_FILE, tree, {"facts": (dict, None), "beside": (dict, None)})
    beside: dict[str, Any] = tree["beside"]
    ranker: dict[str, Any] = {}
    if beside.get("ranker"):
        ranker = {"named": False, "sharpness": 1.0}
        ranker |= read_json(folder / RANKER_FOLDER / "ranker.json", newest=2)
    return tree | {
        "ranker": ranker,
        "first_encoder": bool(beside.get("first_encoder")),
        "members": beside.get("members", 0),
        "probabilities": bool(beside.get("probabilities")),
        "metadata": tree["facts"],
        "data_settings": tree["facts"].get(DATA_SETTINGS, {}),
        "files": {},
    }


def verify_files(folder: Path) -> list[Path]:
    """Check the size and checksum of every file of a saved model. Return their paths.

    Raises:
        ModelError: If a file is missing or damaged, or the format is too old to have checksums.
    """
    manifest = Manifest(folder)
    if manifest.is_old:
        raise ModelError(
            f"{folder}: has no checksums; load the model and save it again to add them"
        )
    paths = [manifest.file(name) for name in manifest["files"]]
    for number in range(1, manifest["members"] + 1):
        paths += verify_files(folder / MEMBERS_FOLDER / str(number))
    return paths


def fingerprint(folder: Path) -> str:
    """Return a checksum that identifies a saved model."""
    if not Manifest(folder).is_old:
        return digest(folder / CONFIG_FILE)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = (f"{path.relative_to(folder)}\0{digest(path)}\0" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_folder(folder: Path) -> Path:
    """Return the folder of a model, given this folder or the folder of its finished run."""
    if not (folder / WEIGHTS_FILE).exists() and (folder / MODEL_FOLDER).is_dir():
        return folder / MODEL_FOLDER
    if (folder / METRICS_FILE).exists():
        raise ModelError(
            f"{folder}: the run is not finished, so it has no model yet; "
            "run the same `elias train` command again to resume it"
        )
    return folder


def as_json(value: Any) -> Any:
    """Convert a value to JSON-compatible types. NaN and infinity become None."""
    text = json.dumps(value, default=np.generic.item)
    return json.loads(text, parse_constant=lambda _: None)


# --- tensors ---


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], remedy: str, *, compact: bool = False
) -> None:
    """Write a safetensors file. Raise an error if a tensor contains NaN or infinity.

    ``remedy`` is the last part of the error message, which says how to fix the problem. With
    ``compact``, floating-point matrices are stored in 8 bits with one scale per row.
    """
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise ModelError(
                f"the model is not saved: {name} has a number that is not finite; {remedy}"
            )
    if compact:
        tensors = {k: t for name, tensor in tensors.items() for k, t in _in_8_bits(name, tensor)}
    path.touch()
    mode = path.stat().st_mode
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors lets only the owner read the file


def _in_8_bits(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Convert a floating-point matrix to 8-bit integers and a scale per row; keep other tensors."""
    if tensor.dim() != 2 or not tensor.numel() or not tensor.is_floating_point():
        return [(name, tensor)]
    scale = tensor.float().abs().amax(dim=1) / 127
    nonzero = torch.where(scale > 0, scale, 1)
    integers = (tensor / nonzero.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return [(name, integers), (name + ROW_SCALE, scale)]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise damaged_file(path, f"truncated or damaged ({quoted(error)})") from error


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def all_finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither NaN nor infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # one pass without a mask as large as the tensor; if any number is NaN, both results are NaN
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


# --- names ---

_SPECIAL = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:[\\nr]|u([0-9a-f]{4})|)")
_SHORT = {"\\": r"\\", "\n": r"\n", "\r": r"\r"}
_CHARACTERS = {escaped: character for character, escaped in _SHORT.items()}


def escape(name: str) -> str:
    r"""Escape special characters, so that the name fits on one line without tabs.

    >>> print(escape("two\nlines"))
    two\nlines
    """
    return _SPECIAL.sub(lambda match: _SHORT.get(match[0]) or rf"\u{ord(match[0]):04x}", name)


def unescape(line: str) -> str:
    r"""Return the name that was escaped by `escape`.

    >>> unescape(escape("two\nlines"))
    'two\nlines'
    """
    return _ESCAPE.sub(_unescaped, line) if "\\" in line else line


def _unescaped(match: re.Match[str]) -> str:
    if match[0] == "\\":
        raise ValueError("a backslash must start \\\\, \\n, \\r or \\uXXXX")
    return _CHARACTERS.get(match[0]) or chr(int(match[1], 16))


def write_names(path: Path, names: Iterable[str]) -> None:
    """Write one escaped name per line."""
    path.write_bytes("".join(f"{escape(name)}\n" for name in names).encode("utf8"))


def write_labels(path: Path, labels: Sequence[str]) -> None:
    """Write the label table, with the columns of `LABEL_COLUMNS` that the labels have."""
    columns = {
        name: column
        for name, column in zip(LABEL_COLUMNS, LabelTable.of(labels).columns, strict=True)
        if column is not None
    }
    for name in {"synonyms", "broader"} & {*columns}:
        cells = (json.dumps(x, ensure_ascii=False) if x else "" for x in columns[name])
        columns[name] = tuple(cells)
    rows = zip(*columns.values(), strict=True)
    lines = ["\t".join(columns), *("\t".join(map(escape, row)) for row in rows)]
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf8"))


def read_labels(path: Path, n_labels: int) -> Sequence[str]:
    """Return the saved labels: a `LabelTable`, or a tuple if there is only a column of names."""
    header, *lines = _read_lines(path, n_labels + 1)
    names = header.split("\t")
    if "name" not in names or len({*LABEL_COLUMNS} & {*names}) != len(names):
        raise damaged_file(path, f"has the columns {header!r:.80}, which are not valid")
    if any(line.count("\t") != len(names) - 1 for line in lines):
        raise damaged_file(path, f"not every line has {len(names)} columns")
    cells = "\t".join(lines).split("\t")  # faster than splitting millions of lines
    columns: dict[str, Any] = dict.fromkeys(LABEL_COLUMNS)
    for i, name in enumerate(names):
        columns[name] = _unescape_all(path, cells[i :: len(names)], 2)
    if names == ["name"]:
        return tuple(columns["name"])
    for name in {"synonyms", "broader"} & {*names}:
        try:
            columns[name] = tuple(tuple(json.loads(cell or "[]")) for cell in columns[name])
            is_valid = all(isinstance(item, str) for cell in columns[name] for item in cell)
        except (ValueError, TypeError, RecursionError):
            is_valid = False
        if not is_valid:
            raise damaged_file(path, f"its column {name} must hold JSON lists of names")
    return LabelTable(*columns.values())


def read_names(path: Path, n_names: int) -> tuple[str, ...]:
    """Read ``n_names`` names, one per line."""
    return _unescape_all(path, _read_lines(path, n_names), 1)


def _read_lines(path: Path, n_lines: int) -> list[str]:
    try:
        lines = path.read_bytes().decode("utf8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged_file(path, f"cannot be read ({quoted(error)})") from error
    if lines.pop() != "" or len(lines) != n_lines:
        raise damaged_file(path, f"has {len(lines)} complete lines, not {n_lines}")
    return lines


def _unescape_all(path: Path, cells: Iterable[str], first_line: int) -> tuple[str, ...]:
    names: list[str] = []
    try:
        names.extend(map(unescape, cells))
    except ValueError as error:
        number = first_line + len(names)
        raise ModelError(f"{path}:{number}: {error}; write a backslash as \\\\") from error
    return tuple(names)
