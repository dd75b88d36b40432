"""A reranker on disk: a description, arrays and a vocabulary, written whole and read strictly."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import elias
from elias.data.staging import staged_folder
from elias.errors import DataError, ModelError
from elias.model.layout import VOCABULARY_FILE, broken, quoted
from elias.model.name_lines import read_names, write_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FORMAT_VERSION = 2
"""Raised when an older elias-xmc could not read what this one writes."""

DESCRIPTION_FILE = "ranker.json"
ARRAYS_FILE = "ranker.safetensors"


class Parts(NamedTuple):
    """What is written of a reranker."""

    description: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    vocabulary: Sequence[str]


def write_parts(folder: Path, parts: Parts) -> None:
    """Write a folder that does not exist yet; it appears whole or not at all.

    Raises:
        ModelError: If the folder is taken, cannot be written, or a number is not finite.
    """
    described = {"format_version": FORMAT_VERSION, "elias_version": elias.__version__}
    text = json.dumps(described | parts.description, indent=2, allow_nan=False) + "\n"
    arrays = {name: np.ascontiguousarray(array) for name, array in parts.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ModelError(
                f"{folder}: the ranker is not saved: {name} has a number that is not finite; "
                "check the input features, or lower rerank.cost"
            )
    try:
        with staged_folder(folder) as staging:
            (staging / DESCRIPTION_FILE).write_text(text, encoding="utf8")
            save_file(arrays, staging / ARRAYS_FILE)
            # safetensors makes a file for its owner alone; the others may read it too
            shutil.copymode(staging / DESCRIPTION_FILE, staging / ARRAYS_FILE)
            write_names(staging / VOCABULARY_FILE, parts.vocabulary)
    except DataError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {quoted(error)}") from error


def read_description(
    folder: Path, needed: Mapping[str, type], *, since_version_2: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is said of the reranker in a folder, having checked that all of it is there.

    Args:
        folder: Where it is.
        needed: What must be said, and of which type.
        since_version_2: What older folders do not say, and what holds for them.

    Raises:
        ModelError: If it is missing, damaged, foreign, or from a newer version.
    """
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: has no {DESCRIPTION_FILE}; give the folder of a saved ranker")
    try:
        tree = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken(path, f"not valid JSON ({quoted(error)})") from error
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if type(version) is not int or "elias_version" not in tree:
        raise ModelError(f"{path}: not of a ranker that ELIAS saved; give the folder of one")
    if version > FORMAT_VERSION:
        raise ModelError(
            f"{path}: format {version}, written by elias-xmc {tree['elias_version']}, is newer "
            f"than format {FORMAT_VERSION} of this {elias.__version__}; upgrade elias-xmc"
        )
    described: dict[str, Any] = tree
    if version < 2:
        described |= since_version_2
    for key, kind in needed.items():
        value = described.get(key)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise broken(path, f"{key} is {value!r}")
    return described


def read_arrays(
    folder: Path, wanted: Mapping[str, tuple[type, tuple[int | None, ...]]]
) -> dict[str, NDArray[Any]]:
    """Return the arrays in a folder, which must be exactly the wanted ones.

    Args:
        folder: Where they are.
        wanted: The type and the shape of each; None is any length.

    Raises:
        ModelError: If one is missing, foreign, or not as it was saved.
    """
    path = folder / ARRAYS_FILE
    if not path.is_file():
        raise broken(path, "missing")
    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise broken(path, f"truncated or damaged ({quoted(error)})") from error
    for name in sorted(wanted.keys() ^ arrays.keys()):
        there = "is not a part of this ranker" if name in arrays else "is missing"
        raise broken(path, f"{name} {there}")
    for name, (kind, shape) in wanted.items():
        _check_array(path, name, arrays[name], kind, shape)
    return arrays


def read_vocabulary(folder: Path, n_names: int) -> tuple[str, ...]:
    """Return the words and n-grams in a folder, which must be so many."""
    return read_names(folder / VOCABULARY_FILE, n_names)


def _check_array(
    path: Path, name: str, array: NDArray[Any], kind: type, shape: tuple[int | None, ...]
) -> None:
    fits = array.ndim == len(shape) and all(
        want in (None, size) for size, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        shown = tuple("any" if size is None else size for size in shape)
        raise broken(path, f"{name} has shape {array.shape}, not {shown}")
    if array.dtype != kind:
        raise broken(path, f"{name} is {array.dtype}, not {np.dtype(kind)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise broken(path, f"{name} has a number that is not finite")
