"""Running a model over many texts, batch by batch, without gradients."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from elias.model.recorded_search import ranking_for
from elias.progress import progress
from elias.text.batches import (
    HostCopy,
    PaddedBatch,
    TokenBatch,
    collate,
    copy_to_host,
    n_batches,
    ordered_batches,
    prefetch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from elias.model.elias import EliasModel, SearchSizes
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens


Batch = TypeVar("Batch", TokenBatch, PaddedBatch, TokenBatch | PaddedBatch)

BATCH_SIZE = 256
_IN_FLIGHT = 2  # batches whose results may still be on their way from a GPU


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
    kept: deque[tuple[NDArray[np.int64], HostCopy, HostCopy]] = deque()

    def write(rows: NDArray[np.int64], labels: HostCopy, p: HostCopy) -> None:
        found = labels.wait()
        ids[rows, : found.shape[1]] = found.numpy()
        scores[rows, : found.shape[1]] = p.wait().numpy()

    with ranking_for(model, sizes, width, blocked, len(tokens)) as turn:
        gather = partial(turn.gather, model.encoder, tokens, batch_size)
        for rows, batch in _batches(model, tokens, batch_size, "Searching", gather):
            # a graph may rank more texts, and find more of each
            labels, p = (found[: len(rows), :width] for found in turn.rank(batch))
            kept.append((rows, copy_to_host(labels), copy_to_host(p)))
            if len(kept) > _IN_FLIGHT:
                write(*kept.popleft())
        while kept:
            write(*kept.popleft())
    return Ranked(ids, scores)


def embed_all(
    encoder: TextEncoder, tokens: Tokens, *, batch_size: int = BATCH_SIZE
) -> NDArray[np.float32]:
    """Return φ(x) of every text (N, D)."""
    embedding = np.zeros((len(tokens), encoder.dim), dtype=np.float32)
    for rows, batch in _batches(encoder, tokens, batch_size, "Embedding", partial(collate, tokens)):
        embedding[rows] = encoder(batch).float().cpu().numpy()
    return embedding


def cluster_all(
    model: EliasModel, tokens: Tokens, beam_size: int, *, batch_size: int = BATCH_SIZE
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the b best clusters of every text and their scores ŝ_c: the rows of M in Eq. 9."""
    width = min(beam_size, model.graph.n_clusters)
    beams = np.zeros((len(tokens), width), dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    gather = partial(collate, tokens)
    for rows, batch in _batches(model, tokens, batch_size, "Finding clusters", gather):
        best = model.unsaturated_log(model.encoder(batch).float()).topk(width, dim=1)
        beams[rows] = best.indices.cpu().numpy()
        scores[rows] = best.values.clamp(max=0).exp().cpu().numpy()
    return beams, scores


def _batches(
    model: nn.Module,
    tokens: Tokens,
    batch_size: int,
    description: str,
    gather: Callable[[NDArray[np.int64]], Batch],
) -> Iterator[tuple[NDArray[np.int64], Batch]]:
    device = next(model.parameters()).device
    total = n_batches(len(tokens), batch_size)
    on_gpu = device.type == "cuda"

    def make(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Batch]:
        batch = gather(rows)
        return rows, batch.pin_memory() if on_gpu else batch

    with evaluating(model), progress(description, total) as advance:
        made = map(make, ordered_batches(tokens.lengths, batch_size))
        for rows, batch in prefetch(made) if on_gpu and total > 1 else made:
            yield rows, batch.to(device)
            advance()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout and gradients off, and back to what they were."""
    was_training = model.training
    # telling every part of a large encoder would take as long as a short text
    is_off = not was_training and not any(part.training for part in model.children())
    if not is_off:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if not is_off:
            model.train(was_training)
