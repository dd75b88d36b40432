"""A step's losses and gradients as a CUDA graph: one launch from the token ids to ∂L/∂θ."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from elias.kernels.cuda_graphs import CapturedFunction, GraphRecorder
from elias.model.elias import Losses
from elias.text.batches import PaddedBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elias.kernels import IndexGradients
    from elias.kernels.cuda_graphs import Capture
    from elias.model.elias import EliasModel


class _Found(NamedTuple):
    """What a run leaves, until the next; the dense gradients are where `CudaGraphStep` has them."""

    losses: Tensor
    pairs: tuple[Tensor, Tensor, Tensor]


class CudaGraphStep:
    """Losses of `EliasModel.losses` with all their gradients, recorded once for each shape.

    Batches come as rectangles of few lengths, their positives in few widths (`pad_positives`).
    """

    def __init__(
        self,
        model: EliasModel,
        gradients: IndexGradients,
        losses: Callable[[Tensor, Tensor, Tensor], Losses],
        *,
        waits: bool,
        batch_size: int,
        record: Capture[_Found] | None = None,
    ) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            model: In training, on a GPU; its weights must stay in their memory.
            gradients: Where those of W_L and A go.
            losses: `EliasModel.losses_of` φ, positives and parents.
            waits: Whether an update may come steps later, so that gradients must be copied.
            batch_size: Only batches of so many points are recorded.
            record: In place of CUDA graphs, for tests.
        """
        self._model, self._held, self._losses = model, gradients, losses
        self._waits, self._batch_size = waits, batch_size
        self._encoder = [p for p in model.encoder.parameters() if p.requires_grad]
        self._clusters = list(model.clusters.parameters())
        self._dense = [torch.zeros_like(p) for p in (*self._encoder, *self._clusters)]
        self._record = record or GraphRecorder(self._dense[-1].device)
        self._used: list[bool] = []
        self._recorded = CapturedFunction(self._run, self._record_for_nothing, self._run_whole)

    def close(self) -> None:
        """Give the memory of what was recorded back."""
        self._recorded.release()

    def __call__(self, batch: PaddedBatch, positives: Tensor, parents: Tensor) -> Losses:
        """Return the losses of a batch, leaving the gradients where an optimizer finds them."""
        run = self._recorded if len(batch) == self._batch_size else self._recorded.run_eagerly
        found = run(batch.ids, batch.lengths, positives, parents, full=batch.full)
        self._give(found)
        return Losses(*found.losses.clone().unbind())

    def _record_for_nothing(
        self, work: Callable[[], _Found]
    ) -> tuple[Callable[[], object], _Found]:
        """Capture work; what the runs before add to the gradients is taken back."""
        with self._taken_back(always=True):
            return self._record(work)

    def _run_whole(
        self, ids: Tensor, lengths: Tensor, positives: Tensor, parents: Tensor, *, full: bool
    ) -> _Found:
        """Run; where that fails, memory included, the gradients are those from before."""
        with self._taken_back(always=False):
            return self._run(ids, lengths, positives, parents, full=full)

    @contextmanager
    def _taken_back(self, *, always: bool) -> Iterator[None]:
        """Take what runs add to A's gradients back, and pairs that one which fails leaves."""
        n_pairs = len(self._held.pairs)
        buffers = [part for part in (self._held.by_edge, self._held.touched) if part is not None]
        before = [part.clone() for part in buffers]
        done = False
        try:
            yield
            done = True
        finally:
            if always or not done:
                for part, earlier in zip(buffers, before, strict=True):
                    part.copy_(earlier)
                del self._held.pairs[n_pairs:]

    def _run(
        self, ids: Tensor, lengths: Tensor, positives: Tensor, parents: Tensor, *, full: bool
    ) -> _Found:
        with torch.enable_grad():
            embedding = self._model.encoder.embed(PaddedBatch(ids, lengths, full)).float()
            losses = self._losses(embedding, positives, parents)
            dense = torch.autograd.grad(
                losses.total, [*self._encoder, *self._clusters], allow_unused=True
            )
        self._used = [gradient is not None for gradient in dense]
        with torch.no_grad():
            own = [buffer for buffer, used in zip(self._dense, self._used, strict=True) if used]
            torch._foreach_copy_(own, [gradient for gradient in dense if gradient is not None])
        pairs = self._held.take_last_pairs()
        return _Found(torch.stack([part.detach() for part in losses]), pairs)

    def _give(self, found: _Found) -> None:
        """Leave the gradients where an update finds them."""
        n_encoder = len(self._encoder)
        each = zip(self._encoder, self._dense[:n_encoder], self._used[:n_encoder], strict=True)
        for parameter, gradient, used in each:
            if used:
                parameter.grad = gradient  # moves in every step
        for parameter, gradient in zip(self._clusters, self._dense[n_encoder:], strict=True):
            if parameter.grad is None:
                parameter.grad = self._own(gradient)
            else:
                parameter.grad.add_(gradient)
        labels, coefficients, embedding = found.pairs
        self._held.add_pairs(self._own(labels), self._own(coefficients), self._own(embedding))

    def _own(self, part: Tensor) -> Tensor:
        return part.clone() if self._waits else part


def pad_positives(positives: Tensor, beam_size: int, n_labels: int) -> Tensor:
    """Widen padded positives (B, Y) to one of few widths: the beam's, or a power of two above.

    >>> pad_positives(torch.tensor([[3]]), 2, 9).tolist()
    [[3, 9]]
    """
    width = positives.shape[1]
    wanted = beam_size if width <= beam_size else 1 << (width - 1).bit_length()
    return torch.nn.functional.pad(positives, (0, wanted - width), value=n_labels)
