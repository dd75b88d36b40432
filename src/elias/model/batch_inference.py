"""Run a model over many texts in batches, without gradients, with CUDA graphs on a GPU.

For one text, a GPU runs hundreds of small kernels, and launching them takes ten times as long as
running them. Encoder and search are therefore captured as CUDA graphs. If the model is not in
training, later calls reuse them. The graphs are stored in this module and not in the model, so that
copies of a model and saved models do not contain them.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elias.kernels import cpu, runs_triton
from elias.kernels.cuda_graphs import Capture, CapturedFunction, GraphRecorder
from elias.kernels.threads import thread_map_progress
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder, TextEncoder
from elias.predictions import PADDING_SCORE, Candidates
from elias.progress import progress
from elias.text.batches import (
    HostCopy,
    TokenBatch,
    collate,
    copy_to_host,
    fixed_size_batch,
    n_batches,
    ordered_batches,
    padded_length,
    prefetch,
)
from elias.text.tokens import Tokens

Gather: TypeAlias = Callable[[Tokens, NDArray[np.int64]], TokenBatch]
Graphs: TypeAlias = CapturedFunction[tuple[Tensor, Tensor]]

logger = logging.getLogger(__name__)

BATCH_SIZE = 256
_TEXTS_PER_THREAD = 16  # maximum size of a batch in `rank_in_threads`
_IN_FLIGHT = 2  # maximum number of batches whose results are still being copied from a GPU


def rank_all(
    model: EliasModel,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    *,
    batch_size: int = BATCH_SIZE,
    blocked: Tensor | None = None,
    embed: bool = False,
    graphs: SearchGraphs | None = None,
) -> Candidates:
    """Return the k best labels of every text, without the labels marked in ``blocked`` (L,).

    With ``embed``, the candidates include the embeddings φ(x), unless CUDA graphs are used.
    """
    n_labels, n_texts = model.graph.n_labels, len(tokens.offsets) - 1
    width = min(top_k, sizes.shortlist_size, n_labels)
    ids = np.full((n_texts, width), n_labels, dtype=np.int64)
    scores = np.zeros((n_texts, width), dtype=np.float32)
    phi = np.empty((n_texts, model.encoder.dim), dtype=np.float32) if embed else None

    use_graphs = model.encoder.capturable
    pending: deque[tuple[NDArray[np.int64], HostCopy, HostCopy]] = deque()
    graphs = graphs or SEARCH_GRAPHS

    def write(rows: NDArray[np.int64], labels: Tensor, p: Tensor) -> None:
        ids[rows, : labels.shape[1]] = labels.numpy()
        scores[rows, : labels.shape[1]] = p.numpy()

    def write_pending(most: int) -> None:
        while len(pending) > most:
            rows, labels, p = pending.popleft()
            write(rows, labels.wait(), p.wait())

    with (
        graphs.captured(model, sizes, width, blocked, n_texts) if use_graphs else nullcontext()
    ) as captured:
        gather: Gather = collate
        packs = captured is not None and model.encoder.packs(model.labels.weight.device)
        if captured is not None:
            gather = partial(graphs.gather, model.encoder, batch_size)
            phi = None
        for rows, batch in _batches(
            model, tokens, batch_size, "Searching", gather, by_length=not packs
        ):
            if captured is not None:
                labels, p = captured(
                    batch.ids, batch.offsets, longest=batch.longest, filled=batch.filled
                )
                # a graph may also rank padding texts, and more than k labels of each text
                labels, p = labels[: len(rows), :width], p[: len(rows), :width]
            else:
                embedding = model.encoder(batch).float()
                labels, p = model.rank(embedding, sizes, width, blocked)
                if phi is not None:
                    phi[rows] = embedding.cpu().numpy()
            if labels.is_cuda:
                pending.append((rows, copy_to_host(labels), copy_to_host(p)))
            else:
                write(rows, labels, p)
            write_pending(_IN_FLIGHT)
        write_pending(0)
    scores[ids >= n_labels] = PADDING_SCORE
    return Candidates(ids, scores, phi)


def rank_in_threads(
    model: EliasModel,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    *,
    batch_size: int = BATCH_SIZE,
    blocked: Tensor | None = None,
    embed: bool = False,
) -> Candidates:
    """Return the result of `rank_all` for a transformer on a CPU, with a thread for each batch.

    Threads that share a batch wait for each other in every layer, which takes long if other
    programs use the CPU. Small batches need less padding.
    """
    batch_size = min(batch_size, _TEXTS_PER_THREAD, -(-len(tokens) // numba.get_num_threads()))
    batches = list(ordered_batches(tokens.lengths, max(1, batch_size)))
    if len(batches) <= 1:
        return rank_all(model, tokens, sizes, top_k, blocked=blocked, embed=embed)

    def work(rows: NDArray[np.int64], _: None) -> Candidates:
        torch.set_num_threads(1)  # each new thread starts with the default
        return rank_all(model, tokens.take(rows), sizes, top_k, blocked=blocked, embed=embed)

    # set here what holds for all threads: the mode of the model, and MKL's number of threads
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with evaluating(model):
            parts = list(thread_map_progress(work, batches, lambda: None, "Searching", len(tokens)))
    finally:
        torch.set_num_threads(before)
    order = np.argsort(np.concatenate(batches))
    vectors = [part.embedding for part in parts if part.embedding is not None]
    return Candidates(
        np.concatenate([part.ids for part in parts])[order],
        np.concatenate([part.scores for part in parts])[order],
        np.concatenate(vectors)[order] if vectors else None,
    )


def rank_few(
    model: EliasModel,
    encoder: BagEncoder,
    tokens: Tokens,
    sizes: SearchSizes,
    top_k: int,
    blocked: Tensor | None = None,
) -> Candidates:
    """Return the result of `rank_all`, with φ(x), for a few texts with a bag encoder on a CPU.

    This runs numba kernels, because calling torch operations would take longer than running them.
    Scores differ from those of `rank_all` by rounding.
    """
    assert tokens.weights is not None
    n_texts, n_labels, n_clusters = len(tokens.offsets) - 1, model.n_labels, model.graph.n_clusters
    embedding = np.empty((n_texts, encoder.dim), dtype=np.float32)
    beam = np.empty((n_texts, min(sizes.beam_size, n_clusters)), dtype=np.int64)
    beam_log = np.empty(beam.shape, dtype=np.float32)
    with torch.inference_mode():
        ids, weights = tokens.ids.astype(np.int64), np.array(tokens.weights)
        cpu.embed_bags(ids, tokens.offsets, weights, encoder.arrays(), encoder.norm.eps, embedding)
        clusters = model.clusters.weight.numpy(), model.clusters.bias.numpy()
        cpu.find_beams(embedding, *clusters, math.log(model.alpha), beam, beam_log)
        labels, scores = model.rank_arrays((embedding, beam, beam_log), sizes, top_k, blocked)
    scores[labels >= n_labels] = PADDING_SCORE
    return Candidates(labels, scores, embedding)


def embed_all(
    encoder: TextEncoder, tokens: Tokens, *, batch_size: int = BATCH_SIZE
) -> NDArray[np.float32]:
    """Return φ(x) of every text (N, D)."""
    embedding = np.zeros((len(tokens), encoder.dim), dtype=np.float32)
    for rows, batch in _batches(encoder, tokens, batch_size, "Embedding"):
        embedding[rows] = encoder(batch).float().cpu().numpy()
    return embedding


def cluster_all(
    model: EliasModel, tokens: Tokens, beam_size: int, *, batch_size: int = BATCH_SIZE
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the b best clusters of every text and their scores ŝ_c, the rows of M in Eq. 9."""
    width = min(beam_size, model.graph.n_clusters)
    beams = np.zeros((len(tokens), width), dtype=np.int64)
    scores = np.zeros((len(tokens), width), dtype=np.float32)
    for rows, batch in _batches(model, tokens, batch_size, "Finding clusters"):
        best = model.unsaturated_log(model.encoder(batch).float()).topk(width, dim=1)
        beams[rows] = best.indices.cpu().numpy()
        scores[rows] = best.values.clamp(max=0).exp().cpu().numpy()
    return beams, scores


def _batches(
    model: nn.Module,
    tokens: Tokens,
    batch_size: int,
    description: str,
    gather: Gather = collate,
    *,
    by_length: bool = True,
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """Yield row indices and their batch on the model's device. Batches for a GPU are prefetched.

    With ``by_length``, the texts of a batch have similar lengths, so that they need less padding.
    Otherwise the texts keep their order, and batches have similar numbers of tokens.
    """
    device, lengths = next(model.parameters()).device, np.diff(tokens.offsets)
    with evaluating(model):
        if len(lengths) <= batch_size and device.type == "cpu":  # a fast path for single texts
            if len(lengths):
                order = np.argsort(lengths, kind="stable")
                yield order, gather(tokens, order)
            return

        def make(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], TokenBatch]:
            batch = gather(tokens, rows)
            return rows, batch.pin_memory() if device.type == "cuda" else batch

        keys = lengths if by_length else np.zeros_like(lengths)
        made = map(make, ordered_batches(keys, batch_size))
        total = n_batches(len(lengths), batch_size)
        with progress(description, total) as advance:
            for rows, batch in prefetch(made) if device.type == "cuda" and total > 1 else made:
                yield rows, batch.to(device)
                advance()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and gradients, and restore both afterwards."""
    was_training = model.training
    # setting the mode of all modules of a large encoder takes as long as encoding a short text
    change = model.training or any(map(attrgetter("training"), model.children()))
    if change:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if change:
            model.train(was_training)


def can_capture(model: EliasModel) -> bool:
    """Return whether searches of a model can be captured as CUDA graphs on its device."""
    return model.encoder.capturable and runs_triton(model.labels.weight)


@dataclass(eq=False)
class SearchGraphs:
    """Cache of the CUDA graphs of searches, for each model."""

    many_texts: int = 16_384
    """Minimum number of texts for which compiling the encoder, or capturing graphs for a single
    call, saves time."""
    large_call: int = 1_024
    """Calls with at least this number of texts count towards ``many_texts``."""
    min_calls: int = 8
    """Number of calls with the same shape before a CUDA graph is captured for it."""
    max_graphs: int = 64
    """Maximum number of shapes (length and number of texts) captured for a model."""
    min_width: int = 100
    """Minimum number of labels that a CUDA graph ranks. Calls with a smaller k use the first k."""
    max_padded_tokens: int = 4_096
    """Maximum number of tokens in a partial batch that is padded with empty texts."""
    recorder: Callable[[torch.device], Capture[tuple[Tensor, Tensor]]] = GraphRecorder
    """Function that returns the capture function of a device."""
    supported: Callable[[EliasModel], bool] = can_capture
    """Function that returns True if the searches of a model can be captured."""
    by_model: MutableMapping[EliasModel, _ModelGraphs] = field(default_factory=WeakKeyDictionary)
    _n_predicted: MutableMapping[EliasModel, int] = field(default_factory=WeakKeyDictionary)

    @contextmanager
    def captured(
        self,
        model: EliasModel,
        sizes: SearchSizes,
        top_k: int,
        blocked: Tensor | None,
        n_texts: int,
    ) -> Iterator[Graphs | None]:
        """Yield the CUDA graphs for ``n_texts`` texts, or None if they cannot be used.

        The graphs rank at least ``top_k`` labels of each text. A model that is not in training
        reuses the graphs of its last call while its weights are unchanged. Only one thread at a
        time can use the graphs of a model; other threads get None. In training, or with blocked
        labels, graphs are captured only for many texts and released after the call, because
        training needs the memory and the same blocked labels seldom recur.
        """
        if n_texts >= self.large_call:
            self._compile_encoder(model, n_texts)
        if not self.supported(model):
            self.by_model.pop(model, None)
            yield None
            return
        if blocked is not None or model.training:
            if model.training:
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
            raise  # keep the graphs: the caller may free other memory first
        except BaseException:
            graphs.captured = None  # the state of the graphs is unknown
            raise
        finally:
            graphs.lock.release()

    def gather(
        self, encoder: TextEncoder, batch_size: int, tokens: Tokens, rows: NDArray[np.int64]
    ) -> TokenBatch:
        """Return the texts of ``rows`` as a batch of one of a few sizes, for CUDA graphs.

        The number of texts in a partial batch is rounded up to a power of two. If the encoder pads
        texts, this is only done for batches of at most ``max_padded_tokens`` tokens.
        """
        packs = encoder.packs(next(encoder.parameters()).device)
        n_rows = batch_size
        if len(rows) < batch_size:
            n_rows = min(1 << (len(rows) - 1).bit_length(), batch_size)
            most = int((tokens.offsets[rows + 1] - tokens.offsets[rows]).max())
            n_tokens = n_rows * padded_length(most, encoder.max_length)
            if not packs and n_rows > len(rows) and n_tokens > self.max_padded_tokens:
                return collate(tokens, rows)
        pad_id, max_length = encoder.pad_id, encoder.max_length
        return fixed_size_batch(
            tokens, rows, pad_id=pad_id, max_length=max_length, packs=packs, n_rows=n_rows
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
    ) -> Graphs:
        """Return a function that ranks texts with CUDA graphs.

        It holds only a weak reference to the model.
        """
        reference = ref(model)

        def rank(
            ids: Tensor, offsets: Tensor, *, longest: int, filled: bool
        ) -> tuple[Tensor, Tensor]:
            model = reference()
            assert model is not None
            batch = TokenBatch(ids, offsets, longest, filled=filled)
            embedding = model.encoder(batch).float()
            return model.rank(embedding, sizes, top_k, blocked)

        capture = self.recorder(model.labels.weight.device)
        return CapturedFunction(rank, capture, min_calls=min_calls, max_graphs=max_graphs)

    def _compile_encoder(self, model: EliasModel, n_texts: int) -> None:
        """Compile the encoder once it pays off.

        That is after ``many_texts`` texts in calls with at least ``large_call`` texts each.
        """
        weight = model.labels.weight
        if model.training or not (weight.is_cuda or self.supported(model)):
            return
        before = self._n_predicted.get(model, 0)
        self._n_predicted[model] = before + n_texts
        if before < self.many_texts <= before + n_texts and model.encoder.prepare(weight.device):
            logger.info("encoder.compile: compiling the encoder for prediction")
            self.by_model.pop(model, None)  # these graphs call the uncompiled encoder

    def clear(self) -> None:
        """Free all CUDA graphs. Later predictions may capture new ones."""
        self.by_model.clear()

    def release(self) -> bool:
        """Free all CUDA graphs not in use and stop capturing. Return True if there were any."""
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


@dataclass(eq=False)
class _ModelGraphs:
    """The CUDA graphs of one model, with the sizes, settings and weights they were captured for.

    Listing all tensors of a model with hundreds of modules takes as long as searching a text. The
    dictionaries that hold the tensors are therefore cached.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    captured: Graphs | None = None
    _captured_sizes: tuple[SearchSizes, int] | None = None
    _edge_scores: Tensor | None = None  # kept alive, because the graphs read it
    _children: list[Mapping[str, nn.Module | None]] = field(default_factory=list)
    _tables: list[Mapping[str, Tensor | None]] = field(default_factory=list)
    _state: list[object] = field(default_factory=list)

    def captured_for(
        self, graphs: SearchGraphs, model: EliasModel, sizes: SearchSizes, top_k: int
    ) -> Graphs:
        """Return the last CUDA graphs if sizes and weights are unchanged, else capture new ones."""
        width = min(max(top_k, graphs.min_width), sizes.shortlist_size, model.n_labels)
        if self._captured_sizes is not None and self._captured_sizes[0] == sizes:
            width = max(width, self._captured_sizes[1])
        with torch.inference_mode():
            edge_scores = model.graph.unsaturated_log()
        unchanged = edge_scores is self._edge_scores and self._current(model) == self._state
        if self.captured is None or not unchanged or self._captured_sizes != (sizes, width):
            self.captured = None  # free the memory of the old graphs first
            parts = list(model.modules())
            self._children = [part._modules for part in parts if part._modules]
            tables = [table for part in parts for table in (part._parameters, part._buffers)]
            self._tables = [table for table in tables if table]
            self._edge_scores, self._state = edge_scores, self._current(model)
            self._captured_sizes = sizes, width
            self.captured = graphs.capture(
                model, sizes, width, min_calls=graphs.min_calls, max_graphs=graphs.max_graphs
            )
        return self.captured

    def _current(self, model: EliasModel) -> list[object]:
        """Return the settings of a model, and the addresses and versions of its tensors."""
        graph = model.graph
        state: list[object] = [model.alpha, graph.beta, graph.learned, graph.n_labels]
        state += [id(part) for children in self._children for part in children.values()]
        for table in self._tables:
            for tensor in table.values():
                if tensor is not None:
                    version = 0 if tensor.is_inference() else tensor._version
                    state.append((tensor.data_ptr(), version))
        return state


SEARCH_GRAPHS = SearchGraphs()
"""The CUDA graphs of all models in this process."""
