"""One step, or one search, over all processes: each with its share of the points."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elias.data.batches import collate, send
from elias.distributed.dropout import KeyedDropout, point_keys
from elias.distributed.rows import SharedRows
from elias.model.inference import BATCH_SIZE, Ranked, cluster_all, embed_all, evaluating
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from elias.data.batches import TokenBatch
    from elias.data.tokens import Tokens
    from elias.distributed.world import World
    from elias.model.elias import EliasModel, SearchSizes
    from elias.model.encoder import TextEncoder


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """This process's share of a training batch."""

    own: TokenBatch
    n_points: int
    """Of the whole batch."""
    keys: Tensor
    """What each own point's dropout is keyed by."""

    def to(self, device: torch.device) -> SharedBatch:
        """Return the batch on a device."""
        return replace(self, own=self.own.to(device), keys=send(self.keys, device))

    def pinned(self) -> SharedBatch:
        """Return the batch in memory that a GPU reads without help."""
        return replace(self, own=self.own.pinned(), keys=self.keys.pin_memory())

    @contextmanager
    def ready(self, model: EliasModel) -> Iterator[None]:
        """Have the model's losses be this share's part of the batch's, dropout keyed by point."""
        rows = model.labels
        assert isinstance(rows, SharedRows)
        rows.n_points = self.n_points
        with KeyedDropout(self.keys, self.own):
            yield


def share_of(
    world: World, tokens: Tokens, rows: NDArray[np.int64], seed: Sequence[int]
) -> SharedBatch:
    """Return this process's share of the batch that ``rows`` make up."""
    own = rows[world.share(len(rows))]
    return SharedBatch(collate(tokens, own), len(rows), point_keys(seed, own))


def rank_shared(
    model: EliasModel,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    *,
    batch_size: int = BATCH_SIZE,
    blocked: Tensor | None = None,
) -> Ranked:
    """Return what `rank_all` does for this process's texts, of a model whose labels are shared out.

    All processes call it, each with texts of its own: as many, fewer, or none. In each step each
    searches a batch of its own, and scores its labels for the points of all.
    """
    rows = model.labels
    assert isinstance(rows, SharedRows)
    world, device = rows.world, rows.weight.device
    width = min(top_k, sizes.shortlist_size, model.n_labels)
    ids = np.full((len(tokens), width), model.n_labels, dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    most = world.begin_highest([len(tokens)])()[0]
    order = np.argsort(tokens.lengths, kind="stable")  # shortest first: the least padding
    with evaluating(model), progress("Searching", -(-most // batch_size)) as advance:
        for start in range(0, most, batch_size):
            own = order[start : start + batch_size]
            rows.n_points = min(batch_size, most - start) * world.size
            embedding = model.encoder(collate(tokens, own).to(device)).float()
            labels, p = model.rank(embedding, sizes, width, blocked)
            ids[own, : labels.shape[1]] = labels.cpu().numpy()
            scores[own, : labels.shape[1]] = p.cpu().numpy()
            advance()
    return Ranked(ids, scores)


def rows_of_all(world: World, own: NDArray[Any], n_rows: int, empty: float) -> NDArray[Any]:
    """Return the rows (n, k) that all processes have for their shares, in order, to all.

    Where a process has fewer columns than another, ``empty`` is put.
    """
    width = world.begin_highest([own.shape[1]])()[0]
    padded = np.full((world.most(n_rows), width), empty, dtype=own.dtype)
    padded[: len(own), : own.shape[1]] = own
    found: NDArray[Any] = (
        world.gather(torch.from_numpy(padded).to(world.device), "predictions").cpu().numpy()
    )
    return found[:n_rows]


def embed_shared(
    world: World, encoder: TextEncoder, tokens: Tokens
) -> tuple[NDArray[np.float32], list[int]]:
    """Return φ(x) of this process's share of the texts, and how many each process has."""
    own = tokens.take(np.arange(len(tokens))[world.share(len(tokens))])
    return embed_all(encoder, own), _counts(world, len(tokens))


def cluster_shared(
    world: World, model: EliasModel, tokens: Tokens, beam_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """Return what `cluster_all` does to the first process; None to the others."""
    own = tokens.take(np.arange(len(tokens))[world.share(len(tokens))])
    counts = _counts(world, len(tokens))
    beams, scores = (world.collect(part, counts) for part in cluster_all(model, own, beam_size))
    return None if beams is None or scores is None else (beams, scores)


def _counts(world: World, total: int) -> list[int]:
    """Return how many of ``total`` each process has."""
    most = world.most(total)
    return [max(0, min(most, total - rank * most)) for rank in range(world.size)]
