"""CUDA graphs: capture a function once per input shape, then replay it with one launch.

For a small batch, the GPU finishes kernels faster than the host can launch them one by one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_WARMUP_RUNS = 3  # to compile and load kernels, which is not possible during a capture
_MAX_GRAPHS = 32  # further shapes run eagerly

Result = TypeVar("Result")
Capture: TypeAlias = Callable[[Callable[[], Result]], tuple[Callable[[], object], Result]]
"""Type of a function that captures another function as a CUDA graph.

It returns a function that replays the graph, and the result, which each replay overwrites.
"""


class GraphRecorder:
    """Recorder that captures functions as CUDA graphs in one memory pool.

    Replaying one graph overwrites the results of all other graphs. The tensors that a captured
    function reads must keep their addresses and shapes.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def __call__(self, function: Callable[[], Result]) -> tuple[Callable[[], object], Result]:
        """Warm up and capture the function. Return a function that replays it, and its result."""
        return self.record_all([function])[0]

    def record_all(
        self, functions: Sequence[Callable[[], Any]]
    ) -> list[tuple[Callable[[], object], Any]]:
        """Capture functions that run in this order as a graph each; warm up all before."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                _free_cached()  # the warm-up cannot use memory cached by other streams
                for _ in range(_WARMUP_RUNS):
                    for function in functions:
                        function()
                _free_cached()  # the graph cannot use memory cached by the warm-up
                return [self._capture(function) for function in functions]
        finally:
            current.wait_stream(self._stream)

    def _capture(self, function: Callable[[], Result]) -> tuple[Callable[[], object], Result]:
        graph: Any = torch.cuda.CUDAGraph()
        # thread_local allows the prefetch thread to pin memory during the capture
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            # leave capture mode, so that random numbers can be drawn again
            generator: Any = torch.cuda.default_generators[self._stream.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        graph.capture_end()
        return graph.replay, result


def _free_cached() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class CapturedFunction(Generic[Result]):
    """A function of tensors, captured as a CUDA graph for each input shape that recurs.

    If a capture fails, for example for lack of memory, a warning is logged, no more shapes are
    captured, and shapes without a graph run eagerly. If an eager call runs out of memory while
    graphs exist, the graphs are released and the call is repeated.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        capture: Capture[Result],
        fallback: Callable[..., Result] | None = None,
        *,
        min_calls: int = 1,
        max_graphs: int = _MAX_GRAPHS,
    ) -> None:
        """Store the function and settings without capturing.

        Args:
            function: Takes tensors, and options that are part of the shape.
            capture: Captures a function as a CUDA graph.
            fallback: Variant of ``function`` that undoes its changes if it fails. It is needed if
                ``function`` changes anything before it can run out of memory.
            min_calls: Number of eager calls with a shape before it is captured.
            max_graphs: Maximum number of captured shapes.
        """
        self._function, self._capture = function, capture
        self._fallback = fallback or function
        self._min_calls, self._max_graphs = min_calls, max_graphs
        self._graphs: dict[object, tuple[list[Tensor], Callable[[], object], Result]] = {}
        self._calls: Counter[object] = Counter()
        self._stopped = False

    @property
    def has_graphs(self) -> bool:
        """Return whether at least one graph is captured."""
        return bool(self._graphs)

    @property
    def disabled(self) -> bool:
        """Return whether capturing has stopped and no CUDA graph exists."""
        return self._stopped and not self._graphs

    def __call__(self, *inputs: Tensor, **options: int) -> Result:
        """Replay or run the function and return its result, which the next call may overwrite."""
        key = (*(tensor.shape for tensor in inputs), *options.items())
        if key not in self._graphs and not self._add_graph(key, inputs, options):
            return self.run_eagerly(*inputs, **options)
        buffers, replay, result = self._graphs[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        replay()
        return result

    def run_eagerly(self, *inputs: Tensor, **options: int) -> Result:
        """Run the function without capturing it."""
        if not self._graphs:
            return self._function(*inputs, **options)
        try:
            return self._fallback(*inputs, **options)
        except torch.OutOfMemoryError:
            logger.warning("the CUDA graphs leave too little memory; continuing without them")
            self.release()
        _free_cached()
        return self._function(*inputs, **options)

    def release(self) -> None:
        """Release all graphs and stop capturing."""
        self._graphs.clear()
        self._stopped = True

    def _add_graph(self, key: object, inputs: tuple[Tensor, ...], options: dict[str, int]) -> bool:
        """Capture a new shape after ``min_calls`` eager calls. Return whether it was captured."""
        if self._stopped or self._calls[key] < self._min_calls:
            self._calls[key] += 1
            return False
        if len(self._graphs) == self._max_graphs:
            logger.info(
                "reached the limit of %d CUDA graphs; other shapes run without one",
                self._max_graphs,
            )
            self._stopped = True
            return False
        buffers = [tensor.clone() for tensor in inputs]
        try:
            captured = self._capture(lambda: self._function(*buffers, **options))
        except Exception as error:  # drivers raise many exception types
            reason = str(error).strip().split("\n")[0]
            logger.warning(
                "cannot capture a CUDA graph (%s: %s); continuing without it",
                type(error).__name__,
                reason,
            )
            self._stopped = True
            return False
        self._graphs[key] = buffers, *captured
        return True
