"""Compute the losses and all gradients of a training step in one CUDA graph launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elias.kernels import IndexGradients
from elias.kernels.cuda_graphs import Capture, CapturedFunction, GraphRecorder
from elias.model.elias import EliasModel
from elias.model.losses import Losses
from elias.text.batches import TokenBatch


class _Output(NamedTuple):
    """The output tensors of a step. The next step overwrites them."""

    losses: Tensor
    pairs: tuple[Tensor, Tensor, Tensor]


class CudaGraphStep:
    """Training step that computes the losses and all gradients in one CUDA graph per input shape.

    To limit the number of shapes, batches are padded to a few sizes (`fixed_size_batch`), and lists
    of positive labels to a few widths (`pad_positives`).
    """

    def __init__(
        self,
        model: EliasModel,
        gradients: IndexGradients,
        losses: Callable[[Tensor, Tensor, Tensor], Losses],
        *,
        accumulates: bool,
        batch_size: int,
        record: Capture[_Output] | None = None,
    ) -> None:
        """Allocate the gradient buffers. Graphs are captured during later calls.

        Args:
            model: A model in training mode on a GPU. Its weights must stay at the same addresses.
            gradients: Container for the gradients of label classifiers and edges.
            losses: Function of embeddings, positives and their clusters that calls
                `EliasModel.losses`.
            accumulates: Whether gradients are accumulated over several steps and must be copied.
            batch_size: Number of points in a full batch. Smaller batches run without a graph.
            record: Function that captures a graph. Tests replace it.
        """
        self._model, self._gradients, self._losses = model, gradients, losses
        self._accumulates, self._batch_size = accumulates, batch_size
        self._encoder = [p for p in model.encoder.parameters() if p.requires_grad]
        self._clusters = list(model.clusters.parameters())
        self._dense = [torch.zeros_like(p) for p in (*self._encoder, *self._clusters)]
        self._record = record or GraphRecorder(self._dense[-1].device)
        self._used: list[bool] = []
        self._captured = CapturedFunction(self._run, self._capture, self._run_eagerly)

    def close(self) -> None:
        """Free the memory of the graphs."""
        self._captured.release()

    def __call__(self, batch: TokenBatch, positives: Tensor, parents: Tensor) -> Losses:
        """Return the losses of a batch, and store their gradients for the optimizer."""
        is_full = len(batch) == self._batch_size
        run = self._captured if is_full else self._captured.run_eagerly
        inputs = batch.ids, batch.offsets, positives, parents
        output = run(*inputs, longest=batch.longest, filled=batch.filled)
        self._set_gradients(output)
        return Losses(*output.losses.clone().unbind())

    def _capture(self, work: Callable[[], _Output]) -> tuple[Callable[[], object], _Output]:
        """Capture ``work``, and remove the gradients that its warm-up runs add."""
        with self._restored(always=True):
            return self._record(work)

    def _run_eagerly(self, *inputs: Tensor, **shape: Any) -> _Output:
        """Run without a graph. If that fails, remove the gradients that the run added."""
        with self._restored(always=False):
            return self._run(*inputs, **shape)

    @contextmanager
    def _restored(self, *, always: bool) -> Iterator[None]:
        """Restore the gradients of label classifiers and edges after the block.

        If ``always`` is False, restore them only if the block raises an error.
        """
        gradients = self._gradients
        n_pairs = len(gradients.pairs)
        buffers = [part for part in (gradients.by_edge, gradients.touched) if part is not None]
        copies = [part.clone() for part in buffers]
        undo = True
        try:
            yield
            undo = always
        finally:
            if undo:
                for buffer, earlier in zip(buffers, copies, strict=True):
                    buffer.copy_(earlier)
                del gradients.pairs[n_pairs:]

    def _run(
        self, ids: Tensor, offsets: Tensor, positives: Tensor, parents: Tensor, **shape: Any
    ) -> _Output:
        with torch.enable_grad():
            embedding = self._model.encoder(TokenBatch(ids, offsets, **shape)).float()
            losses = self._losses(embedding, positives, parents)
            dense = torch.autograd.grad(
                losses.total, [*self._encoder, *self._clusters], allow_unused=True
            )
        self._used = [gradient is not None for gradient in dense]
        with torch.no_grad():
            used = [buffer for buffer, used in zip(self._dense, self._used, strict=True) if used]
            torch._foreach_copy_(used, [gradient for gradient in dense if gradient is not None])
        pairs = self._gradients.take_last_pairs()
        return _Output(torch.stack([part.detach() for part in losses]), pairs)

    def _set_gradients(self, output: _Output) -> None:
        """Set the gradients of all parameters from the output of a step."""
        n_encoder = len(self._encoder)
        for parameter, gradient, used in zip(self._encoder, self._dense, self._used, strict=False):
            if used:
                parameter.grad = gradient  # not copied, because every step updates the encoder
        for parameter, gradient in zip(self._clusters, self._dense[n_encoder:], strict=True):
            if parameter.grad is None:
                parameter.grad = self._owned(gradient)
            else:
                parameter.grad.add_(gradient)
        self._gradients.add_pairs(*map(self._owned, output.pairs))

    def _owned(self, tensor: Tensor) -> Tensor:
        """Return a copy if gradients are accumulated over steps, otherwise the tensor itself."""
        return tensor.clone() if self._accumulates else tensor


def pad_positives(positives: Tensor, beam_size: int, n_labels: int) -> Tensor:
    """Pad lists of positive labels (B, Y) with ``n_labels`` to width ``beam_size``.

    If Y is larger than ``beam_size``, pad to the next power of two.

    >>> pad_positives(torch.tensor([[3]]), 2, 9).tolist()
    [[3, 9]]
    """
    width = positives.shape[1]
    padded = beam_size if width <= beam_size else 1 << (width - 1).bit_length()
    return torch.nn.functional.pad(positives, (0, padded - width), value=n_labels)
