"""Everything behind the encoder as a CUDA graph: one launch for the losses and all gradients.

With few points in a batch a GPU finishes the kernels sooner than the host can launch them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from elias.model.elias import Losses

if TYPE_CHECKING:
    from collections.abc import Callable

    from elias.data.batches import TokenBatch
    from elias.kernels.gradients import IndexGradients
    from elias.model.elias import EliasModel, SearchSizes

_MOST_GRAPHS = 8  # one for each number of points and of positives; others run uncaptured


class _Found(NamedTuple):
    """What a run of the head leaves, always in the same memory."""

    losses: Tensor
    by_embedding: Tensor
    by_clusters: tuple[Tensor, ...]
    pairs: tuple[Tensor, Tensor, Tensor]


_Work: TypeAlias = "Callable[[], _Found]"
_Recorded: TypeAlias = "tuple[Callable[[], object], _Found]"


def record(work: _Work) -> _Recorded:
    """Capture a run of ``work``; return what repeats it and where it leaves its results."""
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled and loaded before, not in a capture
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph.replay, found


class CapturedHead:
    """The losses of `EliasModel.losses`, with all behind the encoder captured.

    The gradients are computed with the losses, for a total that is differentiated as it is. The
    next run overwrites them: with ``waits``, where an update may come later, they are copied.
    """

    def __init__(
        self,
        model: EliasModel,
        sizes: SearchSizes,
        gradients: IndexGradients,
        *,
        shortlist_weight: float,
        mean: bool,
        waits: bool,
        record: Callable[[_Work], _Recorded] = record,
    ) -> None:
        self.model = model
        self.gradients = gradients
        self.waits = waits
        self._sizes = sizes
        self._shortlist_weight, self._mean = shortlist_weight, mean
        self._record = record
        self._heads: dict[tuple[torch.Size, torch.Size], _Head] = {}

    def losses(self, tokens: TokenBatch, positives: Tensor, parents: Tensor) -> Losses:
        """Return the losses of a batch; the total carries all gradients."""
        embedding = self.model.encoder(tokens).float()
        shape = (embedding.shape, positives.shape)
        if shape not in self._heads:
            if len(self._heads) == _MOST_GRAPHS:
                return self.run(embedding, positives, parents)
            self._heads[shape] = _Head(self, self._record, embedding, positives, parents)
        found: Tensor = _Replay.apply(  # type: ignore[no-untyped-call]
            embedding, self._heads[shape], positives, parents
        )
        return Losses(*found.unbind())

    def run(self, embedding: Tensor, positives: Tensor, parents: Tensor) -> Losses:
        """Return the losses, uncaptured."""
        return self.model.losses_of(
            embedding,
            positives,
            parents,
            self._sizes,
            shortlist_weight=self._shortlist_weight,
            mean=self._mean,
            gradients=self.gradients,
        )


class _Head:
    """One captured run and the memory it reads."""

    def __init__(
        self, owner: CapturedHead, record: Callable[[_Work], _Recorded], *inputs: Tensor
    ) -> None:
        self._owner = owner
        self._inputs = [part.detach().clone() for part in inputs]
        self._inputs[0].requires_grad_()
        held = owner.gradients
        buffers = [part for part in (held.by_edge, held.touched) if part is not None]
        before = [part.clone() for part in buffers]
        self._replay, self.found = record(self._work)
        for part, earlier in zip(buffers, before, strict=True):
            part.copy_(earlier)  # the runs before the capture count for nothing

    def _work(self) -> _Found:
        clusters = list(self._owner.model.clusters.parameters())
        with torch.enable_grad():
            losses = self._owner.run(*self._inputs)
            by_embedding, *by_clusters = torch.autograd.grad(
                losses.total, [self._inputs[0], *clusters]
            )
        pairs = self._owner.gradients.take_last_pairs()
        parts = torch.stack([part.detach() for part in losses])
        return _Found(parts, by_embedding, tuple(by_clusters), pairs)

    def replay(self, *inputs: Tensor) -> Tensor:
        """Run the head on these inputs and return the losses."""
        with torch.no_grad():
            for own, given in zip(self._inputs, inputs, strict=True):
                own.copy_(given)
        self._replay()
        return self.found.losses.clone()

    def give_gradients(self) -> Tensor:
        """Leave the gradients of clusters and labels where an update finds them; return φ's."""
        found, clusters = self.found, self._owner.model.clusters.parameters()
        for parameter, gradient in zip(clusters, found.by_clusters, strict=True):
            if parameter.grad is None:
                parameter.grad = self._own(gradient)
            else:
                parameter.grad.add_(gradient)
        labels, coefficients, embedding = found.pairs
        self._owner.gradients.add_pairs(
            self._own(labels), self._own(coefficients), self._own(embedding)
        )
        return self._own(found.by_embedding)

    def _own(self, part: Tensor) -> Tensor:
        return part.clone() if self._owner.waits else part


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, embedding: Tensor, head: _Head, positives: Tensor, parents: Tensor
    ) -> Tensor:
        ctx.head = head
        return head.replay(embedding, positives, parents)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.head.give_gradients(), None, None, None
