"""Encoder and search as one step, recorded as CUDA graphs that later calls find again.

One text asks a GPU for hundreds of small kernels, and the host takes ten times as long to launch
them as the GPU to run them. So the graphs of a model that only answers outlive the call that
recorded them. There is one set for a model, here and not in it: copies and saved models have none.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elias.kernels.cuda_graphs import CapturedFunction, GraphRecorder
from elias.kernels.device import runs_triton
from elias.text.batches import PaddedBatch, TokenBatch, collate, pad_batch, padded_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from elias.kernels.cuda_graphs import Capture
    from elias.model.elias import EliasModel, SearchSizes
    from elias.model.encoder import TextEncoder
    from elias.text.tokens import Tokens


logger = logging.getLogger(__name__)

_MANY = 16_384  # texts that pay for compiling, or for graphs that are soon forgotten
_LARGE = 1024  # texts of a call that counts towards compiling: nobody waits for one answer
_TIMES_BEFORE = 8  # a shape that came so often comes again: recording takes as long as that
_MOST_KEPT = 64  # shapes: lengths, times numbers of texts
_LEAST_WIDTH = 100  # labels ranked by a graph: who asks for fewer gets the first of them
_FEW_TOKENS = 4096  # so few take a GPU less time than a host to launch


class Ranking:
    """`EliasModel.rank` of batches; of rectangles recorded, once for each shape.

    It does not keep the model alive, nor what the graphs read: see `ranking_for`.
    """

    def __init__(
        self,
        model: EliasModel,
        sizes: SearchSizes,
        top_k: int,
        blocked: Tensor | None = None,
        record: Capture[tuple[Tensor, Tensor]] | None = None,
        *,
        kept: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self._asked = sizes, top_k, blocked
        if record is None and can_record(model):
            record = GraphRecorder(model.labels.weight.device)
        self.recorded: CapturedFunction[tuple[Tensor, Tensor]] | None = None
        """What ranks rectangles by one launch, where that can be done."""
        work = _rank_of(self._model, *self._asked)
        if record is not None and kept:
            self.recorded = CapturedFunction(
                work, record, min_calls=_TIMES_BEFORE, max_graphs=_MOST_KEPT
            )
        elif record is not None:
            self.recorded = CapturedFunction(work, record)

    def __call__(self, batch: TokenBatch | PaddedBatch) -> tuple[Tensor, Tensor]:
        """Return the labels and their p; of a rectangle, until the next call."""
        if isinstance(batch, PaddedBatch):
            assert self.recorded is not None
            return self.recorded(batch.ids, batch.lengths, full=batch.full)
        model = self._model()
        assert model is not None
        return model.rank(model.encoder(batch).float(), *self._asked)

    def close(self) -> None:
        """Give the memory of what was recorded back, and record no more."""
        if self.recorded is not None:
            self.recorded.release()


def _on_gpu(model: EliasModel) -> bool:
    return model.labels.weight.is_cuda


def can_record(model: EliasModel) -> bool:
    """Say whether a model's searches can be recorded where it is."""
    return model.encoder.takes_padded and runs_triton(model.labels.weight)


def _rank_of(
    model_ref: weakref.ref[EliasModel], sizes: SearchSizes, top_k: int, blocked: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return what ranks padded texts; it does not keep the model alive, nor a `Ranking`."""

    def rank(ids: Tensor, lengths: Tensor, *, full: bool) -> tuple[Tensor, Tensor]:
        model = model_ref()
        assert model is not None
        embedding = model.encoder.embed(PaddedBatch(ids, lengths, full)).float()
        return model.rank(embedding, sizes, top_k, blocked)

    return rank


class Turn(NamedTuple):
    """What ranks the texts of one call."""

    rank: Ranking
    padded: bool
    """Whether it takes rectangles of few shapes."""

    def gather(
        self, encoder: TextEncoder, tokens: Tokens, batch_size: int, rows: NDArray[np.int64]
    ) -> TokenBatch | PaddedBatch:
        """Return the texts of ``rows`` as a batch.

        Of a few, less than a whole batch, the number is padded to a power of two.
        """
        if not self.padded:
            return collate(tokens, rows)
        n_rows = batch_size
        if len(rows) < batch_size:
            n_rows = min(1 << (len(rows) - 1).bit_length(), batch_size)
            most = int((tokens.offsets[rows + 1] - tokens.offsets[rows]).max())
            n_tokens = n_rows * padded_length(most, encoder.max_length)
            if n_rows > len(rows) and n_tokens > _FEW_TOKENS:
                return collate(tokens, rows)
        return pad_batch(
            tokens, rows, pad_id=encoder.pad_id, longest=encoder.max_length, n_rows=n_rows
        )


@contextmanager
def ranking_for(
    model: EliasModel, sizes: SearchSizes, top_k: int, blocked: Tensor | None, n_texts: int
) -> Iterator[Turn]:
    """Lend what ranks ``n_texts`` texts; it finds ``top_k`` labels of each, or more.

    A model that is not in training gets what it had the last time, with its graphs, as long as its
    weights are where they were. One thread at a time has it; others go on without. While a model
    is trained, memory is needed for other things, and blocked labels are seldom asked for twice:
    then graphs are for many texts, and last as long as the call.
    """
    if n_texts >= _LARGE:
        _prepare(model, n_texts)
    if not can_record(model):
        _KEPT.pop(model, None)
        yield Turn(Ranking(model, sizes, top_k, blocked), padded=False)
        return
    trains = model.training or any(part.training for part in model.children())
    if blocked is not None or trains:
        if trains:
            _KEPT.pop(model, None)
        rank = Ranking(model, sizes, top_k, blocked)
        try:
            yield Turn(rank, padded=rank.recorded is not None and n_texts >= _MANY)
        finally:
            rank.close()
        return
    kept = _KEPT.setdefault(model, _Kept())
    if not kept.lock.acquire(blocking=False):
        yield Turn(Ranking(model, sizes, top_k), padded=False)
        return
    try:
        rank = kept.ranking(model, sizes, top_k)
        assert rank.recorded is not None
        yield Turn(rank, padded=not rank.recorded.disabled)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # who knows of other memory may give it up instead
    except BaseException:
        kept.forget()  # whatever state it is in
        raise
    finally:
        kept.lock.release()


def _prepare(model: EliasModel, n_texts: int) -> None:
    """Have the encoder of a model that answers compiled, where it wants that and it pays."""
    if model.training or not _on_gpu(model):
        return
    before = _ANSWERED.get(model, 0)
    _ANSWERED[model] = before + n_texts
    if before < _MANY <= before + n_texts and model.encoder.prepare(model.labels.weight.device):
        logger.info("encoder.compile: compiling for predictions")
        _KEPT.pop(model, None)  # it was recorded as it ran before


def forget_graphs() -> None:
    """Give the memory of all graphs that are kept back; a model asked again may record anew."""
    _KEPT.clear()


def give_up_graphs() -> bool:
    """Give the memory of all graphs that are kept back, for good; say whether there were any."""
    found = False
    for kept in list(_KEPT.values()):
        if kept.lock.acquire(blocking=False):
            found = kept.close() or found
            kept.lock.release()
    if found:
        torch.cuda.empty_cache()
    return found


class _Kept:
    """What a model ranks with, from call to call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._rank: Ranking | None = None
        self._asked: tuple[SearchSizes, int] | None = None
        self._read: _Read | None = None

    def ranking(self, model: EliasModel, sizes: SearchSizes, top_k: int) -> Ranking:
        """Return what ranks as is asked: the last one, if it does."""
        width = min(max(top_k, _LEAST_WIDTH), sizes.shortlist_size, model.n_labels)
        if self._asked is not None and self._asked[0] == sizes:
            width = max(width, self._asked[1])
        same = self._read is not None and self._read.is_there(model)
        if self._rank is None or not same or self._asked != (sizes, width):
            self.forget()  # its memory first
            self._read = _Read(model)
            self._asked = sizes, width
            self._rank = Ranking(model, sizes, width, kept=True)
        return self._rank

    def forget(self) -> None:
        """Begin anew with the next call."""
        self._rank = self._read = None

    def close(self) -> bool:
        """Forget what was recorded and record no more, if anything was; say whether it was."""
        recorded = None if self._rank is None else self._rank.recorded
        if recorded is None or not recorded.has_graphs:
            return False
        recorded.release()
        return True


_KEPT: weakref.WeakKeyDictionary[EliasModel, _Kept] = weakref.WeakKeyDictionary()
_ANSWERED: weakref.WeakKeyDictionary[EliasModel, int] = weakref.WeakKeyDictionary()


class _Read:
    """What a model's graphs read: weights in their memory, settings that became part of them.

    To ask a model of hundreds of parts for all of its tensors would take as long as a text, so
    where they are held is remembered.
    """

    def __init__(self, model: EliasModel) -> None:
        parts = list(model.modules())
        self._children = [part._modules for part in parts if part._modules]
        self._tables = [
            table for part in parts for table in (part._parameters, part._buffers) if table
        ]
        self._edges = self._edges_of(model)  # the graphs read it, so it must not be freed
        self._then = self._now(model)

    def is_there(self, model: EliasModel) -> bool:
        """Say whether all of it is where and as it was."""
        return self._edges_of(model) is self._edges and self._now(model) == self._then

    def _now(self, model: EliasModel) -> list[object]:
        graph = model.graph
        found: list[object] = [model.alpha, graph.beta, graph.learned, graph.n_labels]
        found += [id(part) for children in self._children for part in children.values()]
        for table in self._tables:
            for tensor in table.values():
                if tensor is not None:
                    version = 0 if tensor.is_inference() else tensor._version
                    found.append((tensor.data_ptr(), version))
        return found

    @staticmethod
    def _edges_of(model: EliasModel) -> Tensor:
        with torch.inference_mode():
            return model.graph.unsaturated_log()
