"""A whole model on disk: the searched model, and beside it its ranker and other members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.errors import ModelError
from elias.model.card import model_card
from elias.model.layout import WEIGHTS_FILE, broken
from elias.model.pretrained import (
    load_model,
    read_encoder,
    staged_model,
    write_encoder,
    write_model,
)
from elias.rerank.probabilities import PROBABILITIES_FILE, Probabilities
from elias.rerank.storage import load_reranker, save_reranker
from elias.training.tracking import METRICS_FILE, MODEL_FOLDER

if TYPE_CHECKING:
    import torch

    from elias.config import EliasConfig
    from elias.model.elias import EliasModel, LinearRows
    from elias.model.encoder import TextEncoder
    from elias.rerank.reranker import Reranker

    _Share = Callable[[LinearRows], LinearRows]

RANKER_FOLDER = "ranker"
FIRST_ENCODER_FOLDER = "first_encoder"
"""φ before training, where the ranker reads that."""
MEMBERS_FOLDER = "members"
"""The other members of an ensemble, each a model's folder, named by its number from 1."""


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The parts of a model."""

    model: EliasModel
    config: EliasConfig
    label_names: Sequence[str]
    facts: Mapping[str, Any]
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
        facts=saved.facts,
        card=model_card(saved.config, saved.label_names, saved.facts),
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
        loaded.facts,
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
