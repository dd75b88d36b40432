"""W_L shared out over processes: label ℓ belongs to process ℓ mod P, as its row ℓ div P.

Neighbouring labels go to different processes because labels are often numbered by how frequent they
are, and the work of a row is how often it is shortlisted. To score a shortlist the embeddings and
label ids of all points go to all owners, and the scores come back: B·(D+K) numbers, never a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from elias.kernels import label_logits
from elias.kernels.one_vs_all import every_label_loss, every_label_top
from elias.model.elias import LinearRows

if TYPE_CHECKING:
    from elias.distributed.world import World
    from elias.kernels.one_vs_all import LabelUpdate
    from elias.kernels.rows import IndexGradients


_PIECE_NUMBERS = 2**24  # weights that travel, or are drawn, at a time: 64 MB


def rows_of(n_labels: int, rank: int, size: int) -> range:
    """Return the labels that process ``rank`` of ``size`` owns, in the order of its rows.

    >>> [list(rows_of(5, rank, 3)) for rank in range(3)]
    [[0, 3], [1, 4], [2]]
    """
    return range(rank, n_labels, size)


class SharedRows(LinearRows):
    """This process's rows of W_L, and what it takes to score labels with all of them.

    The weights are not drawn when it is made, but by `reset` or whoever knows better.
    """

    def __init__(self, world: World, n_labels: int, dim: int) -> None:
        nn.Module.__init__(self)
        self.world = world
        self.n_labels = n_labels
        self.n_points = 0
        """Points of the batch at hand, over all processes; all must know it."""
        n_own = len(rows_of(n_labels, world.rank, world.size))
        self.weight = nn.Parameter(torch.zeros(n_own, dim))
        self.bias = nn.Parameter(torch.zeros(n_own))

    whole = False

    @classmethod
    def of(cls, world: World, rows: LinearRows) -> SharedRows:
        """Return this process's part, in float32, of rows that all processes have."""
        shared = cls(world, len(rows.weight), rows.weight.shape[1])
        with torch.no_grad():
            for name in ("weight", "bias"):
                own = getattr(rows, name)[world.rank :: world.size]
                setattr(shared, name, nn.Parameter(own.to(torch.float32, copy=True)))
        return shared

    @torch.no_grad()
    def reset(self, bias: float = 0.0) -> None:
        """Start over with the small random weights that one process would draw."""
        dim = self.weight.shape[1]
        step = max(1, _PIECE_NUMBERS // dim)
        for first in range(0, self.n_labels, step):
            piece = LinearRows(min(step, self.n_labels - first), dim)
            own = torch.arange(first, first + len(piece.weight)) % self.world.size
            kept = own == self.world.rank
            place = -(-(first - self.world.rank) // self.world.size)
            self.weight[place : place + int(kept.sum())] = piece.weight[kept].to(self.weight.device)
        nn.init.constant_(self.bias, bias)

    def logits(
        self, embedding: Tensor, labels: Tensor, gradients: IndexGradients | None = None
    ) -> Tensor:
        """Return w_ℓ·φ + bias_ℓ of this process's points (B, K), each computed by its owner."""
        found: Tensor = _SharedLogits.apply(  # type: ignore[no-untyped-call]
            embedding, self.weight, self.bias, labels, self, gradients, torch.is_grad_enabled()
        )
        return found

    def every_loss(
        self,
        embedding: Tensor,
        positives: Tensor,
        scale: float,
        update: LabelUpdate | None,
    ) -> Tensor:
        """Return the own labels' part of the loss of all points; the gradient by φ comes back."""
        everyone: Tensor = _Gathered.apply(embedding, self)  # type: ignore[no-untyped-call]
        padded = _padded(positives, self.most, self.n_labels)
        wanted = self.local(self.world.gather(padded, "positives")[: self.n_points])
        return every_label_loss(
            everyone, self.weight, self.bias, wanted, scale=scale, update=update
        )

    def every_top(
        self, embedding: Tensor, top_k: int, blocked: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the k labels of highest logit of this process's points, and the logits."""
        world = self.world
        everyone = world.gather(_padded(embedding, self.most, 0), "embeddings and labels")
        own = None if blocked is None else blocked[world.rank :: world.size]
        rows, logits = every_label_top(everyone, self.weight, self.bias, top_k, own)
        missing = (0, top_k - rows.shape[1])
        labels = nn.functional.pad(rows * world.size + world.rank, missing, value=self.n_labels)
        logits = nn.functional.pad(logits, missing, value=-torch.inf)
        found = (
            world.gather(part, "predictions")
            .view(world.size, world.size, self.most, top_k)[:, world.rank, : len(embedding)]
            .transpose(0, 1)
            .flatten(1)
            for part in (labels, logits)
        )
        labels, logits = found
        return labels, logits

    def batch_size(self, n_points: int) -> int:
        """Return how many points the whole batch has."""
        del n_points
        return self.n_points

    @property
    def most(self) -> int:
        """Return how many points of the batch the process with most of them has."""
        return self.world.most(self.n_points)

    def local(self, labels: Tensor) -> Tensor:
        """Return the rows of labels, where another process's, or none's, is one past the last."""
        own = (labels % self.world.size == self.world.rank) & (labels < self.n_labels)
        return torch.where(own, labels // self.world.size, len(self.weight))

    @torch.no_grad()
    def gathered(self) -> LinearRows | None:
        """Return the rows of all, on the host, to the first process; None to the others."""
        whole = None
        if self.world.is_first:
            with torch.device("meta"):
                whole = LinearRows(self.n_labels, self.weight.shape[1])
            whole = whole.to_empty(device="cpu")
        for name in ("weight", "bias"):
            into = None if whole is None else getattr(whole, name).detach()
            self._gather(getattr(self, name).detach(), into)
        return whole

    def _gather(self, own: Tensor, into: Tensor | None) -> None:
        """Copy a table to the first process, a piece at a time."""
        world = self.world
        sizes = [len(rows_of(self.n_labels, rank, world.size)) for rank in range(world.size)]
        step = max(1, _PIECE_NUMBERS // max(1, own[:1].numel()))
        for first in range(0, max(sizes), step):
            piece = own[first : first + step].float().cpu().numpy()
            counts = [max(0, min(step, size - first)) for size in sizes]
            found = world.collect(piece, counts)
            if found is None or into is None:
                continue
            parts = np.split(found, np.cumsum(counts)[:-1])
            for rank, part in enumerate(parts):
                labels = rows_of(self.n_labels, rank, world.size)[first : first + len(part)]
                into[torch.tensor(labels, dtype=torch.int64)] = torch.from_numpy(part)


class _Gathered(torch.autograd.Function):
    """The embeddings of a batch's points of all processes, in order."""

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, rows: SharedRows) -> Tensor:
        ctx.rows, ctx.count = rows, len(embedding)
        sent = _padded(embedding.detach(), rows.most, 0)
        return rows.world.gather(sent, "embeddings and labels")[: rows.n_points]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        sent = _padded(grads[0], rows.most * rows.world.size, 0)
        return rows.world.scatter_sum(sent, "gradients by embedding")[: ctx.count], None


class _SharedLogits(torch.autograd.Function):
    """The gather-dot over processes, and its gradients.

    Forward, every process gets all embeddings and label ids, scores its own labels, and sends each
    point's scores home; what others own it scores 0. Backward, the gradients by score go the same
    way as the embeddings did, and those by embedding come back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        rows: SharedRows,
        gradients: IndexGradients | None,
        learns: bool,
    ) -> Tensor:
        world, most = rows.world, rows.most
        assert len(embedding) <= most, "all processes must know the size of the batch"
        points = _padded(embedding.detach().float(), most, 0)
        ids = _padded(labels.to(torch.int32), most, rows.n_labels)
        sent = torch.cat([points, ids.view(torch.float32)], dim=1)  # one message for both
        gathered = world.gather(sent, "embeddings and labels")
        everyone = gathered[:, : points.shape[1]].contiguous()
        local = rows.local(gathered[:, points.shape[1] :].contiguous().view(torch.int32).long())
        leaves = [weight.detach(), bias.detach()]
        with torch.set_grad_enabled(learns):
            if learns:
                for part in (everyone, *leaves):
                    part.requires_grad_()
            scores = _own_logits(everyone, leaves[0], leaves[1], local, gradients)
        ctx.rows, ctx.shape, ctx.work = rows, labels.shape, (scores, everyone, leaves)
        ctx.own_gradients = gradients is None
        return world.scatter_sum(scores.detach(), "scores")[: len(labels)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        world, most = ctx.rows.world, ctx.rows.most
        by_score = world.gather(_padded(grads[0].float(), most, 0), "gradients by score")
        scores, everyone, leaves = ctx.work
        wanted = [everyone, *leaves] if ctx.own_gradients else [everyone]
        found = torch.autograd.grad(scores, wanted, by_score, allow_unused=True)
        by_point = torch.zeros_like(everyone) if found[0] is None else found[0]
        by_embedding = world.scatter_sum(by_point, "gradients by embedding")[: ctx.shape[0]]
        by_rows = map(_if_any, found[1:]) if ctx.own_gradients else (None, None)
        return by_embedding, *by_rows, None, None, None, None


def _if_any(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient unless no row has any: autograd fails to add such to one that waits."""
    empty = gradient is None or (gradient.is_sparse and gradient._nnz() == 0)
    return None if empty else gradient


def _own_logits(
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
    local: Tensor,
    gradients: IndexGradients | None,
) -> Tensor:
    if len(weight) == 0:  # more processes than labels
        return (embedding[:, :1] * 0).expand(local.shape)
    return label_logits(embedding, weight, bias, local, gradients)


def _padded(rows: Tensor, count: int, value: float) -> Tensor:
    return nn.functional.pad(rows, (0, 0, 0, count - len(rows)), value=value)
