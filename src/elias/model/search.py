"""Run a model over many texts in batches, without gradients, with CUDA graphs on a GPU.

For one text, a GPU runs hundreds of small kernels, and launching them takes ten times as long as
running them. Encoder and search are therefore captured as CUDA graphs, which later calls reuse if
the model is not in training. The graphs are stored in this module and not in the model, so that
copies and saved models contain none.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from elias.kernels import runs_triton
from elias.kernels.cuda_graphs import CapturedFunction, GraphRecorder
from elias.predictions import PADDING_SCORE, Candidates
from elias.progress import progress
from elias.text.batches import (
    HostCopy,
    PaddedBatch,
    TokenBatch,
    collate,
    copy_to_host,
    n_batches,
    ordered_batches,
    pad_batch,
    padded_length,
    prefetch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from elias.kernels.cuda_graphs import Capture
    from elias.model.elias import EliasModel, SearchSizes
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens


logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", TokenBatch, PaddedBatch, TokenBatch | PaddedBatch)

BATCH_SIZE = 256
_IN_FLIGHT = 2  # batches whose results may still be on their way from a GPU


def rank_all(
    model: EliasModel,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    *,
    batch_size: int = BATCH_SIZE,
    blocked: Tensor | None = None,
    graphs: SearchGraphs | None = None,
) -> Candidates:
    """Return the k best labels of every text; exclude labels that ``blocked`` (L,) marks."""
    lengths, n_labels = np.diff(tokens.offsets), model.graph.n_labels
    width = min(top_k, sizes.shortlist_size, n_labels)
    ids = np.full((len(lengths), width), n_labels, dtype=np.int64)
    scores = np.zeros((len(lengths), width), dtype=np.float32)
    pending: deque[tuple[NDArray[np.int64], HostCopy, HostCopy]] = deque()
    graphs = graphs or SEARCH_GRAPHS

    def write(rows: NDArray[np.int64], labels: HostCopy, p: HostCopy) -> None:
        ids[rows, : labels.tensor.shape[1]] = labels.wait().numpy()
        scores[rows, : labels.tensor.shape[1]] = p.wait().numpy()

    with graphs.captured(model, sizes, width, blocked, len(lengths)) as captured:
        gather: Callable[[NDArray[np.int64]], TokenBatch | PaddedBatch] = partial(collate, tokens)
        if captured is not None:
            gather = partial(graphs.pad, model.encoder, tokens, batch_size)
        for rows, batch in _batches(model, lengths, batch_size, "Searching", gather):
            if captured is not None and isinstance(batch, PaddedBatch):
                labels, p = captured(batch.ids, batch.lengths, full=batch.full)
            else:
                embedding = model.encoder(batch).float()
                labels, p = model.rank(embedding, sizes, width, blocked)
            # a graph may rank more texts, and more labels of each
            labels, p = labels[: len(rows), :width], p[: len(rows), :width]
            if labels.is_cuda:
                pending.append((rows, copy_to_host(labels), copy_to_host(p)))
            else:
                ids[rows, : labels.shape[1]], scores[rows, : labels.shape[1]] = labels, p
            if len(pending) > _IN_FLIGHT:
                write(*pending.popleft())
        while pending:
            write(*pending.popleft())
    scores[ids >= n_labels] = PADDING_SCORE
    return Candidates(ids, scores)


def embed_all(
    encoder: TextEncoder, tokens: Tokens, *, batch_size: int = BATCH_SIZE
) -> NDArray[np.float32]:
    """Return φ(x) of every text (N, D)."""
    embedding = np.zeros((len(tokens), encoder.dim), dtype=np.float32)
    gather = partial(collate, tokens)
    for rows, batch in _batches(encoder, tokens.lengths, batch_size, "Embedding", gather):
        embedding[rows] = encoder(batch).float().cpu().numpy()
    return embedding


def cluster_all(
    model: EliasModel, tokens: Tokens, beam_size: int, *, batch_size: int = BATCH_SIZE
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the b best clusters of every text and their scores ŝ_c, the rows of M in Eq. 9."""
    width = min(beam_size, model.graph.n_clusters)
    beams = np.zeros((len(tokens), width), dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    gather = partial(collate, tokens)
    for rows, batch in _batches(model, tokens.lengths, batch_size, "Finding clusters", gather):
        best = model.unsaturated_log(model.encoder(batch).float()).topk(width, dim=1)
        beams[rows] = best.indices.cpu().numpy()
        scores[rows] = best.values.clamp(max=0).exp().cpu().numpy()
    return beams, scores


def _batches(
    model: nn.Module,
    lengths: NDArray[np.int64],
    batch_size: int,
    description: str,
    gather: Callable[[NDArray[np.int64]], Batch],
) -> Iterator[tuple[NDArray[np.int64], Batch]]:
    """Yield row numbers and their batch on the model's device; prefetch batches for a GPU."""
    device = next(model.parameters()).device
    with evaluating(model):
        if len(lengths) <= batch_size and device.type == "cpu":  # the fast way for a single text
            if len(lengths):
                order = np.argsort(lengths, kind="stable")
                yield order, gather(order)
            return

        def make(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Batch]:
            batch = gather(rows)
            return rows, batch.pin_memory() if device.type == "cuda" else batch

        made = map(make, ordered_batches(lengths, batch_size))
        total = n_batches(len(lengths), batch_size)
        with progress(description, total) as advance:
            for rows, batch in prefetch(made) if device.type == "cuda" and total > 1 else made:
                yield rows, batch.to(device)
                advance()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and gradients, and restore both afterwards."""
    was_training = model.training
    # setting the mode of every part of a large encoder takes as long as a short text
    is_off = not (was_training or any(map(attrgetter("training"), model.children())))
    if not is_off:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if not is_off:
            model.train(was_training)


def can_capture(model: EliasModel) -> bool:
    """Return True if searches of a model can be captured as CUDA graphs on its device."""
    return model.encoder.takes_padded and runs_triton(model.labels.weight)


class SearchGraphs:
    """Cache of the CUDA graphs of searches, for each model.

    Args:
        many_texts: Number of texts from which compiling the encoder, or capturing graphs for a
            single call, saves time.
        large_call: Minimum number of texts of a call that counts towards ``many_texts``.
        min_calls: Number of calls with a shape before it is captured.
        max_graphs: Maximum number of shapes (length and number of texts) captured for a model.
        min_width: Minimum number of labels that a graph ranks; a call with lower k takes the top k.
        max_padded_tokens: Maximum number of tokens of a batch whose number of texts is padded.
        recorder: Return the function that captures graphs on a device.
        supported: Return True if searches of a model can be captured.
    """

    def __init__(
        self,
        *,
        many_texts: int = 16_384,
        large_call: int = 1_024,
        min_calls: int = 8,
        max_graphs: int = 64,
        min_width: int = 100,
        max_padded_tokens: int = 4_096,
        recorder: Callable[[torch.device], Capture[tuple[Tensor, Tensor]]] = GraphRecorder,
        supported: Callable[[EliasModel], bool] = can_capture,
    ) -> None:
        self.many_texts, self.large_call = many_texts, large_call
        self.min_calls, self.max_graphs = min_calls, max_graphs
        self.min_width, self.max_padded_tokens = min_width, max_padded_tokens
        self._recorder, self._supported = recorder, supported
        self.by_model: weakref.WeakKeyDictionary[EliasModel, _ModelGraphs] = (
            weakref.WeakKeyDictionary()
        )
        self._n_predicted: weakref.WeakKeyDictionary[EliasModel, int] = weakref.WeakKeyDictionary()

    @contextmanager
    def captured(
        self,
        model: EliasModel,
        sizes: SearchSizes,
        top_k: int,
        blocked: Tensor | None,
        n_texts: int,
    ) -> Iterator[CapturedFunction[tuple[Tensor, Tensor]] | None]:
        """Yield the CUDA graphs for ``n_texts`` texts, or None if they cannot be used.

        The graphs rank at least ``top_k`` labels of each text. A model that is not in training
        reuses the graphs of its last call while its weights are unchanged. Only one thread at a
        time can use the graphs of a model; for other threads this yields None. In training, or
        with blocked labels, graphs are captured only for many texts and released after the call,
        because training needs the memory and the same blocked labels seldom occur again.
        """
        if n_texts >= self.large_call:
            self._compile_encoder(model, n_texts)
        if not model.encoder.takes_padded or not self._supported(model):
            self.by_model.pop(model, None)
            yield None
            return
        in_training = model.training or any(map(attrgetter("training"), model.children()))
        if blocked is not None or in_training:
            if in_training:
                self.by_model.pop(model, None)
            if n_texts < self.many_texts:
                yield None
                return
            captured = self.capture(model, sizes, top_k, blocked)
            try:
                yield captured
            finally:
                captured.release()
            return
        graphs = self.by_model.setdefault(model, _ModelGraphs())
        if not graphs.lock.acquire(blocking=False):
            yield None
            return
        try:
            captured = graphs.captured_for(self, model, sizes, top_k)
            yield None if captured.disabled else captured
        except (MemoryError, torch.OutOfMemoryError):
            raise  # the caller may free other memory first
        except BaseException:
            graphs.forget()  # its state is unknown
            raise
        finally:
            graphs.lock.release()

    def pad(
        self, encoder: TextEncoder, tokens: Tokens, batch_size: int, rows: NDArray[np.int64]
    ) -> TokenBatch | PaddedBatch:
        """Return the texts of ``rows`` as a batch, padded to one of a few shapes for CUDA graphs.

        The number of texts in a partial batch is padded to a power of two. If that would exceed
        ``max_padded_tokens``, the batch is not padded.
        """
        n_rows = batch_size
        if len(rows) < batch_size:
            n_rows = min(1 << (len(rows) - 1).bit_length(), batch_size)
            most = int((tokens.offsets[rows + 1] - tokens.offsets[rows]).max())
            n_tokens = n_rows * padded_length(most, encoder.max_length)
            if n_rows > len(rows) and n_tokens > self.max_padded_tokens:
                return collate(tokens, rows)
        return pad_batch(
            tokens, rows, pad_id=encoder.pad_id, longest=encoder.max_length, n_rows=n_rows
        )

    def capture(
        self,
        model: EliasModel,
        sizes: SearchSizes,
        top_k: int,
        blocked: Tensor | None = None,
        *,
        min_calls: int = 1,
        max_graphs: int = 32,
    ) -> CapturedFunction[tuple[Tensor, Tensor]]:
        """Return a function that ranks padded texts with CUDA graphs.

        It holds only a weak reference to the model.
        """
        reference = weakref.ref(model)

        def rank(ids: Tensor, lengths: Tensor, *, full: bool) -> tuple[Tensor, Tensor]:
            model = reference()
            assert model is not None
            embedding = model.encoder.embed(PaddedBatch(ids, lengths, full)).float()
            return model.rank(embedding, sizes, top_k, blocked)

        capture = self._recorder(model.labels.weight.device)
        return CapturedFunction(rank, capture, min_calls=min_calls, max_graphs=max_graphs)

    def _compile_encoder(self, model: EliasModel, n_texts: int) -> None:
        """Compile the encoder once a model has predicted ``many_texts`` texts in large calls."""
        weight = model.labels.weight
        if model.training or not (weight.is_cuda or self._supported(model)):
            return
        before = self._n_predicted.get(model, 0)
        self._n_predicted[model] = before + n_texts
        if before < self.many_texts <= before + n_texts and model.encoder.prepare(weight.device):
            logger.info("encoder.compile: compiling for predictions")
            self.by_model.pop(model, None)  # captured before it was compiled

    def clear(self) -> None:
        """Free all graphs; later predictions may capture new ones."""
        self.by_model.clear()

    def release(self) -> bool:
        """Free all graphs that are not in use and disable them; return True if there were any."""
        released = False
        for graphs in list(self.by_model.values()):
            if graphs.lock.acquire(blocking=False):
                if graphs.captured is not None and graphs.captured.has_graphs:
                    graphs.captured.release()
                    released = True
                graphs.lock.release()
        if released:
            torch.cuda.empty_cache()
        return released


class _ModelGraphs:
    """The graphs of one model, with the search sizes and weights they were captured for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.captured: CapturedFunction[tuple[Tensor, Tensor]] | None = None
        self._asked: tuple[SearchSizes, int] | None = None
        self._weights: _Weights | None = None

    def captured_for(
        self, graphs: SearchGraphs, model: EliasModel, sizes: SearchSizes, top_k: int
    ) -> CapturedFunction[tuple[Tensor, Tensor]]:
        """Return the graphs of the last call if sizes and weights still match, else new ones."""
        width = min(max(top_k, graphs.min_width), sizes.shortlist_size, model.n_labels)
        if self._asked is not None and self._asked[0] == sizes:
            width = max(width, self._asked[1])
        unchanged = self._weights is not None and self._weights.are_unchanged(model)
        if self.captured is None or not unchanged or self._asked != (sizes, width):
            self.forget()  # free the memory first
            self._weights = _Weights(model)
            self._asked = sizes, width
            self.captured = graphs.capture(
                model, sizes, width, min_calls=graphs.min_calls, max_graphs=graphs.max_graphs
            )
        return self.captured

    def forget(self) -> None:
        """Drop the graphs, so that the next call creates new ones."""
        self.captured = self._weights = None


class _Weights:
    """The addresses and versions of the tensors that a model's graphs read, and its settings.

    Listing all tensors of a model with hundreds of modules takes as long as searching a text. The
    dictionaries that hold the tensors are therefore cached.
    """

    def __init__(self, model: EliasModel) -> None:
        parts = list(model.modules())
        self._children = [part._modules for part in parts if part._modules]
        self._tables = [
            table for part in parts for table in (part._parameters, part._buffers) if table
        ]
        self._edges = self._edge_scores(model)  # the graphs read it, so it must not be freed
        self._state = self._current(model)

    def are_unchanged(self, model: EliasModel) -> bool:
        """Return True if no tensor or setting of the model has changed."""
        return self._edge_scores(model) is self._edges and self._current(model) == self._state

    def _current(self, model: EliasModel) -> list[object]:
        graph = model.graph
        state: list[object] = [model.alpha, graph.beta, graph.learned, graph.n_labels]
        state += [id(part) for children in self._children for part in children.values()]
        for table in self._tables:
            for tensor in table.values():
                if tensor is not None:
                    version = 0 if tensor.is_inference() else tensor._version
                    state.append((tensor.data_ptr(), version))
        return state

    @staticmethod
    def _edge_scores(model: EliasModel) -> Tensor:
        with torch.inference_mode():
            return model.graph.unsaturated_log()


SEARCH_GRAPHS = SearchGraphs()
"""The CUDA graphs of all models in this process."""
