"""Running a model over many texts, batch by batch, without gradients."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elias.data.batches import collate, n_batches, ordered_batches
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from elias.data.batches import TokenBatch
    from elias.data.tokens import Tokens
    from elias.model.elias import EliasModel, SearchSizes
    from elias.model.encoder import TextEncoder

BATCH_SIZE = 256


class Ranked(NamedTuple):
    """The best labels of N texts, descending; missing slots hold ``n_labels`` and 0."""

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]


def rank_all(
    model: EliasModel,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    *,
    batch_size: int = BATCH_SIZE,
    blocked: Tensor | None = None,
) -> Ranked:
    """Return the k best labels of every text."""
    width = min(top_k, sizes.shortlist_size, model.n_labels)
    ids = np.full((len(tokens), width), model.n_labels, dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    for rows, batch in _batches(model, tokens, batch_size, "Searching"):
        labels, p = model.rank(model.encoder(batch).float(), sizes, width, blocked)
        ids[rows, : labels.shape[1]] = labels.cpu().numpy()
        scores[rows, : labels.shape[1]] = p.cpu().numpy()
    return Ranked(ids, scores)


def embed_all(
    encoder: TextEncoder, tokens: Tokens, *, batch_size: int = BATCH_SIZE
) -> NDArray[np.float32]:
    """Return φ(x) of every text (N, D)."""
    embedding = np.zeros((len(tokens), encoder.dim), dtype=np.float32)
    for rows, batch in _batches(encoder, tokens, batch_size, "Embedding"):
        embedding[rows] = encoder(batch).float().cpu().numpy()
    return embedding


def cluster_all(
    model: EliasModel, tokens: Tokens, beam_size: int, *, batch_size: int = BATCH_SIZE
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the b best clusters of every text and their scores ŝ_c: the rows of M in Eq. 9."""
    width = min(beam_size, model.graph.n_clusters)
    beams = np.zeros((len(tokens), width), dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    for rows, batch in _batches(model, tokens, batch_size, "Finding clusters"):
        best = model.unsaturated_log(model.encoder(batch).float()).topk(width, dim=1)
        beams[rows] = best.indices.cpu().numpy()
        scores[rows] = best.values.clamp(max=0).exp().cpu().numpy()
    return beams, scores


def _batches(
    model: nn.Module, tokens: Tokens, batch_size: int, description: str
) -> Iterator[tuple[NDArray[np.int64], TokenBatch]]:
    device = next(model.parameters()).device
    total = n_batches(len(tokens), batch_size)
    with evaluating(model), progress(description, total) as advance:
        for rows in ordered_batches(tokens.lengths, batch_size):
            yield rows, collate(tokens, rows).to(device)
            advance()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout and gradients off, and back to what they were."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
