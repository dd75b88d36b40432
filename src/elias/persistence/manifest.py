"""Save a model to a folder and load it again.

The folder's files are named in `elias.errors`. Nothing in it is code or pickle.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import elias
from elias.config import EliasConfig, EncoderConfig, ResolvedConfig, fill_sizes
from elias.data.atomic import staged_folder
from elias.errors import (
    CARD_FILE,
    CONFIG_FILE,
    DATA_SETTINGS,
    FORMAT_VERSION,
    LABELS_FILE,
    WEIGHTS_FILE,
    ConfigError,
    DataError,
    ModelError,
    broken,
    quoted,
)
from elias.model.build import IDF, rebuild_encoder, save_encoder
from elias.model.elias import EliasModel, LinearRows
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.persistence.card import model_card
from elias.persistence.labels_file import read_names, write_names
from elias.persistence.reranker_files import load_reranker, save_reranker
from elias.rerank.probabilities import PROBABILITIES_FILE, Probabilities

if TYPE_CHECKING:
    from elias.rerank.reranker import Reranker

    _Share = Callable[[LinearRows], LinearRows]

METRICS_FILE = "metrics.jsonl"
MODEL_FOLDER = "model"
_EDGE_LABELS = "graph.edge_labels"
_LABEL_WEIGHT = "labels.weight"
_REMOVED = "graph.removed_log"
"""Saved where edges were pruned."""


class LoadedModel(NamedTuple):
    """A saved model, ready to predict."""

    model: EliasModel
    config: ResolvedConfig
    label_names: tuple[str, ...]
    metadata: dict[str, Any]
    """What was said of the model when it was saved: metrics, data statistics."""
    beside: dict[str, int]
    """What else was saved in the folder, by its name: whether, or how many."""


class _Description(NamedTuple):
    """What `CONFIG_FILE` says, checked."""

    n_labels: int
    n_clusters: int
    n_edges: int
    graph_learned: bool
    alpha: float
    beta: float
    encoder: dict[str, Any]
    config: ResolvedConfig
    metadata: dict[str, Any]
    beside: dict[str, int]


def save_model(
    folder: str | Path,
    model: EliasModel,
    *,
    config: ResolvedConfig,
    label_names: Sequence[str],
    metadata: Mapping[str, Any],
    card: str,
    overwrite: bool = False,
) -> None:
    """Save a model so that `load_model` finds it whole, or not at all.

    Args:
        folder: Where to; it must not exist, or be empty.
        model: The trained model, on any device.
        config: The resolved configuration it was trained with.
        label_names: One name for each label.
        metadata: What is worth keeping beside the model, as JSON can hold it.
        card: The text of the model card.
        overwrite: Replace the saved model that is in ``folder``.

    Raises:
        ModelError: If the folder is taken, or cannot be written.
    """
    with staged_model(folder, overwrite=overwrite) as staging:
        write_model(
            staging, model, config=config, label_names=label_names, metadata=metadata, card=card
        )


@contextmanager
def staged_model(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` when the block ends without an error.

    Raises:
        ModelError: If the folder is taken, or cannot be written.
    """
    folder = Path(folder)
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not is_saved_model(folder):
        raise ModelError(
            f"{folder}: holds no saved model, so it is not replaced; choose another folder"
        )
    try:
        with staged_folder(folder, overwrite=overwrite) as staging:
            yield staging
    except DataError as error:
        raise ModelError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be written: {quoted(error)}") from error


def is_saved_model(folder: str | Path) -> bool:
    """Say whether a folder looks like a saved model, broken or not."""
    return all((Path(folder) / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def write_model(
    folder: Path,
    model: EliasModel,
    *,
    config: ResolvedConfig,
    label_names: Sequence[str],
    metadata: Mapping[str, Any],
    card: str,
    beside: Mapping[str, int] | None = None,
) -> None:
    """Write a model's files into an empty folder, e.g. one that is staged with more beside them.

    ``beside`` says what more there is, so that it is missed if it is not there.
    """
    assert len(label_names) == model.n_labels, "every label has a name"
    encoder, tensors = save_encoder(model.encoder, folder)
    tensors |= {name: _storable(tensor) for name, tensor in model.state_dict().items()}
    tensors[_EDGE_LABELS] = tensors[_EDGE_LABELS].to(torch.int32)
    if config.index.label_storage == "compact":  # nothing is lost: it was trained in bfloat16
        tensors[_LABEL_WEIGHT] = tensors[_LABEL_WEIGHT].to(torch.bfloat16)
    _refuse_non_finite(tensors)
    write_names(folder / LABELS_FILE, label_names)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors makes a file for its owner alone; the others may read what they may read beside
    shutil.copymode(folder / LABELS_FILE, folder / WEIGHTS_FILE)
    description = {
        "format_version": FORMAT_VERSION,
        "elias_version": elias.__version__,
        "n_labels": model.n_labels,
        "n_clusters": model.graph.n_clusters,
        "n_edges": model.graph.edge_labels.shape[1],
        "graph_learned": model.graph.learned,
        "alpha": model.alpha,
        "beta": model.graph.beta,
        "encoder": encoder,
        "config": config.to_dict(),
        "facts": _plain(metadata),
        "beside": {name: int(count) for name, count in (beside or {}).items()},
    }
    text = json.dumps(description, indent=2, allow_nan=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf8")
    (folder / CARD_FILE).write_bytes(card.encode("utf8", "replace"))


def load_model(
    folder: str | Path,
    device: torch.device | str = "cpu",
    share: Callable[[LinearRows], LinearRows] | None = None,
) -> LoadedModel:
    """Read a saved model, ready to predict on ``device``.

    ``share`` takes a part of the rows of W_L, as they lie in the file, where not all are wanted.

    Raises:
        ModelError: If anything is missing, damaged, foreign, or from a newer version.
    """
    folder = Path(folder)
    described = _read_description(folder)
    label_names = read_names(folder / LABELS_FILE, described.n_labels)
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    extra = {IDF: tensors.pop(IDF)} if IDF in tensors else {}
    try:
        encoder = rebuild_encoder(described.encoder, described.config.encoder, folder, extra)
        # shapes without numbers: the saved ones take their place, and nothing is drawn at random
        with torch.device("meta"):
            model = _empty_model(described, encoder, pruned=_REMOVED in tensors)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise broken(folder / CONFIG_FILE, f"its sizes make no model ({quoted(error)})") from error
    _check_tensors(folder / WEIGHTS_FILE, tensors, model)
    tensors[_EDGE_LABELS] = tensors[_EDGE_LABELS].to(torch.int64)
    if share is None:
        tensors[_LABEL_WEIGHT] = tensors[_LABEL_WEIGHT].to(torch.float32)
    model.load_state_dict(tensors, assign=True)
    if share is not None:
        model.labels = share(model.labels)
    return LoadedModel(
        model.to(torch.device(device)).eval(),
        described.config,
        label_names,
        described.metadata,
        described.beside,
    )


def read_data_settings(folder: Path) -> dict[str, Any]:
    """Return how a saved model's training data was read, without loading its weights.

    Raises:
        ModelError: If the folder does not describe a saved model.
    """
    return dict(_read_description(folder).metadata.get(DATA_SETTINGS, {}))


def write_encoder(folder: Path, encoder: TextEncoder) -> None:
    """Write a transformer encoder by itself, to a folder that is not there yet."""
    folder.mkdir()
    _, extra = save_encoder(encoder, folder)
    assert not extra, "a transformer has no more tensors than its own"
    tensors = {name: _storable(tensor) for name, tensor in encoder.state_dict().items()}
    _refuse_non_finite(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_encoder(folder: Path, config: EncoderConfig, device: torch.device | str) -> TextEncoder:
    """Read what `write_encoder` wrote, ready to embed on ``device``.

    Raises:
        ModelError: If anything is missing or damaged.
    """
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    encoder = rebuild_encoder({"kind": "transformer"}, config, folder, {})
    wanted = encoder.state_dict()
    for name in sorted(wanted.keys() ^ tensors.keys()):
        there = "is not a part of this encoder" if name in tensors else "is missing"
        raise broken(folder / WEIGHTS_FILE, f"{name} {there}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape or not all_finite(tensor):
            raise broken(folder / WEIGHTS_FILE, f"{name} is not as it was saved")
    encoder.load_state_dict(tensors)
    return encoder.to(torch.device(device)).eval()


def _empty_model(described: _Description, encoder: TextEncoder, *, pruned: bool) -> EliasModel:
    if described.config.index.kind == "all":
        return OneVsAll(encoder, described.n_labels)
    edges = (described.n_clusters, described.n_edges)
    graph = LabelGraph(
        torch.empty(edges, dtype=torch.int64),
        described.n_labels,
        described.beta,
        edge_logits=torch.empty(edges) if described.graph_learned else None,
        removed_log=torch.empty(described.n_clusters) if pruned else None,
    )
    return EliasModel(encoder, graph, described.alpha)


def _storable(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    return tensor.cpu().contiguous()


def _refuse_non_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse to save what `load_model` would refuse to load."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise ModelError(
                f"the model is not saved: {name} has a number that is not finite; "
                "lower the learning rates (stages.NAME.*_lr) and train again"
            )


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read_description(folder: Path) -> _Description:
    path = folder / CONFIG_FILE
    tree = _read_json(folder)
    version = tree.get("format_version")
    if "elias_version" not in tree or type(version) is not int:
        raise ModelError(f"{path}: not of a model that ELIAS saved; give the folder of one")
    if version > FORMAT_VERSION:
        raise ModelError(
            f"{path}: format {version}, written by elias-xmc {tree['elias_version']}, is newer "
            f"than format {FORMAT_VERSION} of this {elias.__version__}; upgrade elias-xmc"
        )
    if version == 1:
        tree["beside"] = {}
    _check_values(path, tree)
    try:
        # sizes that older versions did not save only matter to training
        config = fill_sizes(EliasConfig.from_dict(tree["config"]), 0, tree["n_labels"])
    except ConfigError as error:
        raise broken(path, f"config does not fit this version of elias-xmc ({error})") from error
    values = {key: tree[key] for key in _NEEDED}
    return _Description(**values | {"config": config, "metadata": values.pop("facts")})


def _check_values(path: Path, tree: dict[str, Any]) -> None:
    for key, (kind, least) in _NEEDED.items():
        value: Any = tree.get(key)
        if not _is_of(kind, value) or (least is not None and not least <= value < math.inf):
            raise broken(path, f"{key} is {value!r}")
    for name, count in tree["beside"].items():
        if type(count) is not int or count < 0:
            raise broken(path, f"beside.{name} is {count!r}")
    settings: Any = tree["facts"].get(DATA_SETTINGS, {})
    if not isinstance(settings, dict) or not (
        all(isinstance(settings.get(key, ""), str) for key in ("text", "labels", "separator"))
        and isinstance(seed := settings.get("seed", 0), int)
        and seed >= 0
    ):
        raise broken(path, f"metadata.{DATA_SETTINGS} is {settings!r}")


_NEEDED: dict[str, tuple[type, int | None]] = {
    "n_labels": (int, 1),
    "n_clusters": (int, 1),
    "n_edges": (int, 1),
    "graph_learned": (bool, None),
    "alpha": (float, 1),
    "beta": (float, 1),
    "encoder": (dict, None),
    "config": (dict, None),
    "facts": (dict, None),
    "beside": (dict, None),
}


def _is_of(kind: type, value: Any) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give that of a saved model")
    if not path.is_file():
        raise ModelError(f"{folder}: has no {CONFIG_FILE}; give the folder of a saved model")
    try:
        tree = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken(path, f"not valid JSON ({quoted(error)})") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: not of a model that ELIAS saved; give the folder of one")
    return tree


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise broken(path, "missing")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise broken(path, f"truncated or damaged ({quoted(error)})") from error


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], model: EliasModel) -> None:
    """Refuse tensors that are not exactly those of the model, or hold impossible numbers."""
    wanted = model.state_dict()
    for name in sorted(wanted.keys() - tensors.keys()):
        raise broken(path, f"{name} is missing")
    for name in sorted(tensors.keys() - wanted.keys()):
        raise broken(path, f"{name} is not a part of this model")
    for name, tensor in tensors.items():
        shape, dtype = tuple(wanted[name].shape), wanted[name].dtype
        if tuple(tensor.shape) != shape:
            raise broken(path, f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype not in _STORED_AS.get(name, {dtype}):
            raise broken(path, f"{name} is {tensor.dtype}, not {dtype}")
        if not all_finite(tensor):
            raise broken(path, f"{name} has a number that is not finite")
    lowest, highest = tensors[_EDGE_LABELS].aminmax()
    if lowest < 0 or highest > model.n_labels:
        raise broken(path, f"{_EDGE_LABELS} has a label outside 0..{model.n_labels}")


_STORED_AS = {
    _EDGE_LABELS: {torch.int32, torch.int64},
    _LABEL_WEIGHT: {torch.float32, torch.bfloat16},
}
"""Types of tensors that need not be the model's own."""


def all_finite(tensor: Tensor) -> bool:
    """Return whether every number of a tensor is finite; integers always are."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # both are nan if any is: one pass, and no mask as large as the weights
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


RANKER_FOLDER = "ranker"
FIRST_ENCODER_FOLDER = "first_encoder"
"""φ before training, where the ranker reads that."""
MEMBERS_FOLDER = "members"
"""The other members of an ensemble, each a model's folder, named by its number from 1."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The parts of a model."""

    model: EliasModel
    config: ResolvedConfig
    label_names: Sequence[str]
    metadata: Mapping[str, Any]
    reranker: Reranker | None = None
    first_encoder: TextEncoder | None = None
    others: tuple[SavedModel, ...] = field(default=())
    probabilities: Probabilities | None = None


def save_all(folder: Path, saved: SavedModel, *, overwrite: bool = False) -> None:
    """Write all of a model to a folder, which appears whole or not at all."""
    with staged_model(folder, overwrite=overwrite) as staging:
        _write(staging, saved)


def _write(folder: Path, saved: SavedModel) -> None:
    write_model(
        folder,
        saved.model,
        config=saved.config,
        label_names=saved.label_names,
        metadata=saved.metadata,
        card=model_card(saved.config, saved.label_names, saved.metadata),
        beside={
            "ranker": saved.reranker is not None,
            "first_encoder": saved.first_encoder is not None,
            "members": len(saved.others),
            "probabilities": saved.probabilities is not None,
        },
    )
    if saved.probabilities is not None:
        saved.probabilities.save(folder / PROBABILITIES_FILE)
    if saved.reranker is not None:
        save_reranker(saved.reranker, folder / RANKER_FOLDER)
    if saved.first_encoder is not None:
        write_encoder(folder / FIRST_ENCODER_FOLDER, saved.first_encoder)
    for number, other in enumerate(saved.others, start=1):
        place = folder / MEMBERS_FOLDER / str(number)
        place.mkdir(parents=True)
        _write(place, other)


def model_folder(folder: Path) -> Path:
    """Return the folder of the model, given that or the folder of its finished run."""
    if not (folder / WEIGHTS_FILE).exists() and (folder / MODEL_FOLDER).is_dir():
        return folder / MODEL_FOLDER
    if (folder / METRICS_FILE).exists():
        raise ModelError(
            f"{folder}: the run is not finished, so it has no model yet; "
            "the same `elias train` command goes on with it"
        )
    return folder


def load_all(folder: Path, device: torch.device, share: _Share | None = None) -> SavedModel:
    """Read all of a model; ``share`` is that of `load_model`.

    Raises:
        ModelError: If anything is missing, damaged, foreign, or from a newer version.
    """
    loaded = load_model(folder, device, share)
    reranker = first_encoder = None
    if loaded.beside.get("ranker"):
        reranker = load_reranker(folder / RANKER_FOLDER, n_labels=loaded.model.n_labels)
    if loaded.beside.get("first_encoder"):
        first_encoder = read_encoder(folder / FIRST_ENCODER_FOLDER, loaded.config.encoder, device)
    others = tuple(
        _member(folder / MEMBERS_FOLDER / str(number), device, loaded.label_names, share)
        for number in range(1, loaded.beside.get("members", 0) + 1)
    )
    probabilities = None
    if loaded.beside.get("probabilities"):
        probabilities = Probabilities.load(folder / PROBABILITIES_FILE)
    return SavedModel(
        loaded.model,
        loaded.config,
        loaded.label_names,
        loaded.metadata,
        reranker,
        first_encoder,
        others,
        probabilities,
    )


def _member(
    folder: Path, device: torch.device, label_names: Sequence[str], share: _Share | None
) -> SavedModel:
    member = load_all(folder, device, share)
    if list(member.label_names) != list(label_names):
        raise broken(folder, "has other labels than the first member")
    return member
