"""Shard the label classifiers W_L over P processes: label ℓ is row ℓ div P of process ℓ mod P.

Consecutive labels go to different processes to balance the work, because labels are often sorted by
frequency and frequent labels are shortlisted more often. To score shortlists, every process gathers
the embeddings and shortlists of all points (B·(D+K) numbers), and returns the scores of its own
labels. Rows of W_L are never sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elias.distributed.world import World
from elias.kernels import IndexGradients, label_logits
from elias.kernels.one_vs_all_loss import LabelUpdate, every_label_top
from elias.model.elias import LinearRows

_CHUNK_NUMBERS = 2**24  # number of weights sent or drawn at a time (64 MB)


class ShardedRows(LinearRows):
    """This process's rows of W_L. Other labels are scored by the processes that own them.

    The constructor sets all weights to zero. Call `reset` to draw random weights.
    """

    def __init__(self, world: World, n_labels: int, dim: int) -> None:
        nn.Module.__init__(self)
        self.world = world
        self.n_labels = n_labels
        self.n_points = 0
        """Number of points in the current batch of all processes. Set it before each batch."""
        n_rows = len(range(world.rank, n_labels, world.size))
        self.weight = nn.Parameter(torch.zeros(n_rows, dim))
        self.bias = nn.Parameter(torch.zeros(n_rows))

    whole = False

    @classmethod
    def of(cls, world: World, rows: LinearRows) -> ShardedRows:
        """Return this process's share of unsharded rows, as a float32 copy."""
        sharded = cls(world, len(rows.weight), rows.weight.shape[1])
        for name, table in rows.named_parameters():
            share = table.detach()[world.rank :: world.size]
            setattr(sharded, name, nn.Parameter(share.to(torch.float32, copy=True)))
        return sharded

    @torch.no_grad()
    def reset(self, bias: float = 0.0) -> None:
        """Draw the same random weights as `LinearRows.reset` draws in a single process."""
        dim, world = self.weight.shape[1], self.world
        step = max(1, _CHUNK_NUMBERS // dim)
        for first in range(0, self.n_labels, step):
            chunk = LinearRows(min(step, self.n_labels - first), dim).weight
            offset = (world.rank - first) % world.size
            share = chunk[offset :: world.size]
            row = (first + offset) // world.size
            self.weight[row : row + len(share)] = share.to(self.weight.device)
        nn.init.constant_(self.bias, bias)

    def logits(
        self, embedding: Tensor, labels: Tensor, gradients: IndexGradients | None = None
    ) -> Tensor:
        """Return the logits (B, K) of this process's points.

        Each process computes the logits of its own labels for the points of all processes. The
        logits of other labels are 0, so the sum over all processes has the logits of all labels.
        """
        assert len(embedding) <= self.max_points, "n_points must be the size of the whole batch"
        everyone = self._gather(embedding.float())
        ids = _pad_rows(labels.to(torch.int32), self.max_points, self.n_labels)
        rows = self.local_rows(self.world.all_gather(ids, "embeddings and labels").long())
        # Skip the weights if no label is local: autograd cannot add to an empty sparse gradient.
        if len(self.weight) and (gradients is not None or bool((rows < len(self.weight)).any())):
            logits = label_logits(everyone, self.weight, self.bias, rows, gradients)
        else:
            logits = (everyone[:, :1] * 0).expand(rows.shape)
        scores: Tensor = _Scatter.apply(logits, self, len(labels))  # type: ignore[no-untyped-call]
        return scores

    def _gather(self, embedding: Tensor) -> Tensor:
        """Return the embeddings of all processes, padded to ``max_points`` each."""
        everyone: Tensor = _Gather.apply(embedding, self)  # type: ignore[no-untyped-call]
        return everyone

    def all_rows_loss(
        self,
        embedding: Tensor,
        positives: Tensor,
        scale: float,
        update: LabelUpdate | None,
        drawn: Tensor | None = None,
    ) -> Tensor:
        """Return the one-vs-all loss of this process's labels, over the points of all processes."""
        everyone = self._gather(embedding)[: self.n_points]
        padded = _pad_rows(positives, self.max_points, self.n_labels)
        rows = self.local_rows(self.world.all_gather(padded, "positives")[: self.n_points])
        own = None if drawn is None else drawn[self.world.rank :: self.world.size]
        return super().all_rows_loss(everyone, rows, scale, update, own)

    def all_rows_top(
        self, embedding: Tensor, top_k: int, blocked: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the best labels and their logits for the points of this process.

        They are merged from the k best labels that each process finds among its rows of W_L.
        """
        world, most = self.world, self.max_points
        everyone = self._gather(embedding)
        own_blocked = None if blocked is None else blocked[world.rank :: world.size]
        rows, logits = every_label_top(everyone, self.weight, self.bias, top_k, own_blocked)
        missing = (0, top_k - rows.shape[1])
        labels = nn.functional.pad(rows * world.size + world.rank, missing, value=self.n_labels)
        logits = nn.functional.pad(logits, missing, value=-torch.inf)

        def own_points(part: Tensor) -> Tensor:
            shape = (world.size, world.size, most, top_k)
            parts = world.all_gather(part, "predictions").view(shape)
            return parts[:, world.rank, : len(embedding)].transpose(0, 1).flatten(1)

        return own_points(labels), own_points(logits)

    def batch_size(self, n_points: int) -> int:
        """Return the number of points in the whole batch. ``n_points`` is not used."""
        del n_points
        return self.n_points

    @property
    def max_points(self) -> int:
        """Return the number of points in the largest share of the whole batch."""
        return self.world.max_share(self.n_points)

    def local_rows(self, labels: Tensor) -> Tensor:
        """Return the local row of each label.

        For padding and labels of other processes, return the number of local rows.
        """
        is_local = (labels % self.world.size == self.world.rank) & (labels < self.n_labels)
        return torch.where(is_local, labels // self.world.size, len(self.weight))

    @torch.no_grad()
    def gathered(self) -> LinearRows | None:
        """Return the rows of all processes on the CPU of rank 0, and None on other ranks."""
        world, whole = self.world, None
        if world.is_rank0:
            with torch.device("meta"):
                whole = LinearRows(self.n_labels, self.weight.shape[1])
            whole = whole.to_empty(device="cpu")
        labels = [np.arange(rank, self.n_labels, world.size) for rank in range(world.size)]
        for name, table in self.named_parameters():
            step = max(1, _CHUNK_NUMBERS // table.shape[1:].numel())
            for first in range(0, len(labels[0]), step):
                chunk = slice(first, first + step)
                rows = world.gather_rows(table[chunk].float().cpu().numpy())
                if whole is not None:
                    ids = np.concatenate([owned[chunk] for owned in labels])
                    getattr(whole, name)[torch.from_numpy(ids)] = torch.from_numpy(rows)
        return whole


class _Gather(torch.autograd.Function):
    """Autograd function that gathers embeddings in rank order, padded to `max_points` each.

    Backward: sum the gradients over all processes, and return this process's share.
    """

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, rows: ShardedRows) -> Tensor:
        ctx.rows, ctx.count = rows, len(embedding)
        padded = _pad_rows(embedding, rows.max_points, 0)
        return rows.world.all_gather(padded, "embeddings and labels")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        by_embedding = ctx.rows.world.reduce_scatter(grads[0], "gradients by embedding")
        return by_embedding[: ctx.count], None


class _Scatter(torch.autograd.Function):
    """Autograd function that sums logits over all processes, and returns those of its own points.

    Backward: gather the gradients of all processes in rank order.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: ShardedRows, count: int) -> Tensor:
        ctx.rows = rows
        return rows.world.reduce_scatter(logits, "scores")[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        padded = _pad_rows(grads[0].float(), ctx.rows.max_points, 0)
        return ctx.rows.world.all_gather(padded, "gradients by score"), None, None


def _pad_rows(rows: Tensor, count: int, value: float) -> Tensor:
    return nn.functional.pad(rows, (0, 0, 0, count - len(rows)), value=value)
