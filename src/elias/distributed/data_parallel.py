"""Split batches over processes, sum gradients, gather results."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elias.distributed.dropout import KeyedDropout, point_keys
from elias.distributed.sharded_linear import SharedRows
from elias.model.batch_inference import BATCH_SIZE, Ranked, cluster_all, embed_all, evaluating
from elias.progress import progress
from elias.text.batches import collate, send

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from elias.distributed.world import World
    from elias.model.elias import EliasModel, SearchSizes
    from elias.model.encoder import TextEncoder
    from elias.text.batches import TokenBatch
    from elias.text.tokens import Tokens


_TOGETHER = 2**22  # numbers: larger gradients travel alone, without a copy


@torch.no_grad()
def sum_gradients(world: World, parameters: Iterable[Tensor], rows: Iterable[Tensor]) -> None:
    """Give every parameter the sum of its gradients over all processes.

    ``parameters`` have dense gradients, of zeros where a process has no point; those that a model
    does not use have none, in any process. ``rows`` have sparse ones, or none.
    """
    together: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.numel() > _TOGETHER:
            sum_touched(world, parameter.grad)
        else:
            together.append(parameter.grad)
    if together:
        flat = torch.cat([gradient.reshape(-1) for gradient in together])
        world.sum_(flat, "gradients of shared parameters")
        first = 0
        for gradient in together:
            gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
            first += gradient.numel()
    for table in rows:
        table.grad = _sum_of_rows(world, table)


@torch.no_grad()
def sum_touched(world: World, gradient: Tensor, touched: Tensor | None = None) -> None:
    """Add up a large gradient over processes, in place, of which most rows may be zero.

    Of A a batch touches the edges of B·b clusters at most: where that is little of the whole, those
    rows alone travel. ``touched`` says which are not zero here; it is added up as well.
    """
    what = "gradients of shared parameters"
    if gradient.dim() < 2 or gradient.numel() <= _TOGETHER:
        world.sum_(gradient, what)
        if touched is not None:
            world.sum_(touched, what)
        return
    if touched is None:
        touched = (gradient != 0).flatten(1).any(dim=1).to(torch.int32)
    rows = world.sum_(touched, what).nonzero()[:, 0]
    if 2 * len(rows) > len(gradient):
        world.sum_(gradient, what)
    else:
        gradient[rows] = world.sum_(gradient[rows], what)


def _sum_of_rows(world: World, table: Tensor) -> Tensor:
    """Return the sum of a table's sparse gradients: the rows that any process touched."""
    own = table.grad
    if own is None:
        indices = torch.zeros(1, 0, dtype=torch.int64)
        own = torch.sparse_coo_tensor(indices, table.new_zeros(0, *table.shape[1:]), table.shape)
    own = own.coalesce()
    counts = world.gather(torch.tensor([own._nnz()], device=table.device))
    most = int(counts.max())
    ids = torch.full((most,), len(table), dtype=torch.int64, device=table.device)
    ids[: own._nnz()] = own.indices()[0]
    values = own.values().new_zeros(most, *own.values().shape[1:])
    values[: own._nnz()] = own.values()
    all_ids = world.gather(ids, "gradients of rows")
    all_values = world.gather(values, "gradients of rows")
    kept = all_ids < len(table)
    return torch.sparse_coo_tensor(
        all_ids[kept].unsqueeze(0), all_values[kept], table.shape, check_invariants=False
    ).coalesce()


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
