"""The training step of several processes, divided where they communicate.

The forward and the backward pass of the encoder are a CUDA graph each. Between them, the processes
exchange embeddings and scores. No graph contains a collective operation, so each process captures,
replays or launches its passes without regard to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elias.distributed import World
from elias.distributed.data_parallel import KeyedDropout, ShardedBatch, sum_touched
from elias.kernels.cuda_graphs import CapturedFunction, GraphRecorder
from elias.model.encoder import TextEncoder
from elias.model.losses import Losses
from elias.text.batches import TokenBatch

_BUCKET = 2**22  # minimum number of gradients that are summed together


class _Encoded(NamedTuple):
    """The result of the encoder's forward pass."""

    embedding: Tensor
    """Embeddings of this process's texts. The next step overwrites them."""
    backward: Callable[[Tensor], object]
    """Function that computes the gradients of the encoder from the gradient by embedding."""


class ShardedStep:
    """Training step of several processes with an encoder that has only dense gradients.

    On a GPU, gradients are summed beside the encoder's backward pass: those of the index while all
    of it runs, and those of the encoder in groups of parameters, from the last layer to the first.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        world: World,
        sum_index: Callable[[], None],
        *,
        batch_size: int,
        captures: bool,
    ) -> None:
        """Allocate the gradient buffers. Graphs are captured during later calls.

        Args:
            encoder: An encoder in training mode. Its weights must stay at the same addresses.
            world: The processes.
            sum_index: Function that sums the gradients of the other parameters over all processes.
            batch_size: Number of points in a full batch of all processes.
            captures: Whether full batches run as CUDA graphs.
        """
        self._encoder, self._world, self._sum_index = encoder, world, sum_index
        self._parameters = [p for p in encoder.parameters() if p.requires_grad]
        self._buckets = [_Bucket(group) for group in _groups(self._parameters)]
        device = self._parameters[0].device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        n_points = len(range(batch_size)[world.share(batch_size)])
        self._gradient = torch.zeros(n_points, encoder.dim, device=device)
        self._captured = CapturedFunction(self._run, self._capture)
        self._record = GraphRecorder(device) if captures else None

    def close(self) -> None:
        """Free the memory of the graphs."""
        self._captured.release()
        for bucket in self._buckets:
            bucket.close()

    def __call__(self, batch: ShardedBatch, losses: Callable[[Tensor], Losses]) -> Losses:
        """Return the losses of a batch, and store the sums of their gradients.

        ``losses`` is a function of the embeddings of this process's points.
        """
        tokens = batch.tokens
        captures = self._record is not None and len(tokens) == len(self._gradient)
        run = self._captured if captures else self._captured.run_eagerly
        inputs = tokens.ids, tokens.offsets, batch.keys
        encoded = run(*inputs, longest=tokens.longest, filled=tokens.filled)
        embedding = encoded.embedding.detach().requires_grad_()
        result = losses(embedding)
        result.total.backward()  # type: ignore[no-untyped-call]
        assert embedding.grad is not None
        index_ready: Any = None
        if self._stream is not None:
            index_ready = torch.cuda.current_stream(self._stream.device).record_event()
        encoded.backward(embedding.grad)
        # launched after the backward pass, because the host may wait for the gradients of the index
        with self._beside(index_ready):
            self._sum_index()
        for bucket in self._buckets:
            with self._beside(bucket.ready):
                bucket.sum(self._world)
            bucket.set_gradients()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return result

    @contextmanager
    def _beside(self, ready: Any) -> Iterator[None]:
        """Launch the block on another stream, where it runs after the event ``ready``."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield

    def _capture(self, work: Callable[[], _Encoded]) -> tuple[Callable[[], object], _Encoded]:
        """Capture the forward pass ``work``, and the backward pass as a second graph."""
        assert self._record is not None
        encoded: list[_Encoded] = []

        def forward() -> Tensor:
            encoded[:] = [work()]
            return encoded[0].embedding

        def backward() -> None:
            encoded.pop().backward(self._gradient)

        (replay, embedding), (replay_backward, _) = self._record.record_all([forward, backward])

        def run_backward(gradient: Tensor) -> None:
            self._gradient.copy_(gradient)
            replay_backward()

        return replay, _Encoded(embedding, run_backward)

    def _run(self, ids: Tensor, offsets: Tensor, keys: Tensor, **shape: Any) -> _Encoded:
        batch = TokenBatch(ids, offsets, **shape)
        with torch.enable_grad(), KeyedDropout(keys, batch, self._encoder):
            embedding = self._encoder(batch).float()

        def backward(gradient: Tensor) -> None:
            torch.autograd.grad(embedding, self._parameters, gradient, allow_unused=True)
            for bucket in self._buckets:
                bucket.store()

        return _Encoded(embedding.detach(), backward)


class _Bucket:
    """The gradients of some parameters, which are summed over all processes in one message."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        self._flat = torch.zeros(sum(sizes), device=parameters[0].device)
        parts = torch.split(self._flat, sizes)
        self._buffers = {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
        self._used: list[nn.Parameter] = []
        self._new: dict[nn.Parameter, Tensor] = {}
        self.ready: Any = None
        """On a GPU, the event that the gradients are stored. A graph records it, too."""
        if self._flat.is_cuda:
            self.ready = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        register: Any = nn.Parameter.register_hook
        self._hooks = [register(p, partial(self._keep, p)) for p in parameters]

    def close(self) -> None:
        """Stop storing gradients."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._new[parameter] = gradient
        if len(self._new) == len(self._buffers):
            self.store()

    def store(self) -> None:
        """Copy the gradients of a backward pass into the buffer, unless this is done already."""
        if not self._new:
            return
        self._used = list(self._new)
        torch._foreach_copy_([self._buffers[p] for p in self._used], list(self._new.values()))
        self._new.clear()
        if self.ready is not None:
            self.ready.record()

    def sum(self, world: World) -> None:
        """Sum the gradients over all processes."""
        (first, *others) = self._buffers.values()
        sum_touched(world, self._flat if others else first)

    def set_gradients(self) -> None:
        """Set the gradients of the parameters that have a part in the loss."""
        for parameter in self._used:
            parameter.grad = self._buffers[parameter]


def _groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters in reverse order, about the order in which their gradients are computed."""
    groups: list[list[nn.Parameter]] = []
    size = _BUCKET
    for parameter in reversed(parameters):
        if size >= _BUCKET or parameter.numel() >= _BUCKET:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel()
    return groups
