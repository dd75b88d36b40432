"""Batches: texts of like length together, their tokens ragged, their labels padded."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.text.tokens import Tokens


T = TypeVar("T")

_WAIT_SECONDS = 0.1
_LENGTH_MULTIPLE = 8
_LIKE_LENGTH_BATCHES = 50  # texts are sorted by length within this many batches


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of B texts, one after the other."""

    ids: Int[Tensor, " tokens"]
    offsets: Int[Tensor, " B+1"]
    longest: int
    """The most tokens of any text; known on the host, so that padding needs no device answer."""
    weights: Float[Tensor, " tokens"] | None = None

    def __len__(self) -> int:
        """Return B."""
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on a device."""
        return TokenBatch(
            ids=send(self.ids, device),
            offsets=send(self.offsets, device),
            longest=self.longest,
            weights=None if self.weights is None else send(self.weights, device),
        )

    def pinned(self) -> TokenBatch:
        """Return the batch in memory that a GPU reads without help."""
        return TokenBatch(
            ids=self.ids.pin_memory(),
            offsets=self.offsets.pin_memory(),
            longest=self.longest,
            weights=None if self.weights is None else self.weights.pin_memory(),
        )

    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of tokens of each text."""
        return self.offsets[1:] - self.offsets[:-1]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The tokens of B texts, each padded to the same length."""

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    full: bool
    """Whether no text has padding."""

    def __len__(self) -> int:
        """Return B."""
        return len(self.lengths)

    def to(self, device: torch.device) -> Rectangle:
        """Return the batch on a device."""
        return Rectangle(send(self.ids, device), send(self.lengths, device), self.full)

    def pinned(self) -> Rectangle:
        """Return the batch in memory that a GPU reads without help."""
        return Rectangle(self.ids.pin_memory(), self.lengths.pin_memory(), self.full)

    def inside(self) -> Bool[Tensor, "B T"]:
        """Return which of the ids are the texts'; of an empty text the first, all padding."""
        position = torch.arange(self.ids.shape[1], device=self.ids.device)
        return position < self.lengths.clamp(min=1).unsqueeze(1)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; a GPU gets it from pinned memory, so that no one waits."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Received(NamedTuple):
    """A tensor on its way to the host."""

    tensor: Tensor
    arrival: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the tensor once it has arrived."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.tensor


def receive(tensor: Tensor) -> Received:
    """Send a tensor from its device to the host without waiting for it."""
    if not tensor.is_cuda:
        return Received(tensor, None)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    make_event: Any = torch.cuda.Event
    arrival: torch.cuda.Event = make_event()
    arrival.record(torch.cuda.current_stream(tensor.device))
    return Received(copy, arrival)


def ahead(items: Iterable[T], depth: int = 3) -> Iterator[T]:
    """Yield the items, made by a thread of their own and up to ``depth`` in advance.

    What goes wrong there is raised here. The thread ends with the iterator, used up or not.
    """
    maker = _Maker(items, depth)
    maker.start()
    try:
        yield from maker.taken()
    finally:
        maker.stopped.set()
        maker.join()


class _Maker(threading.Thread, Generic[T]):
    """Puts items into a queue until they end, fail, or nobody wants them."""

    def __init__(self, items: Iterable[T], depth: int) -> None:
        super().__init__(name="elias-batches", daemon=True)
        self._items = items
        self._made: Queue[tuple[T] | None] = Queue(depth)
        self._failure: BaseException | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        """Make the items."""
        try:
            for item in self._items:
                self._put((item,))
                if self.stopped.is_set():
                    return
        except BaseException as error:  # whatever it is, the consumer must hear of it
            self._failure = error
        self._put(None)

    def _put(self, made: tuple[T] | None) -> None:
        while not self.stopped.is_set():
            with suppress(Full):
                self._made.put(made, timeout=_WAIT_SECONDS)
                return

    def taken(self) -> Iterator[T]:
        """Yield what was made; raise what went wrong."""
        while (made := self._made.get()) is not None:
            yield made[0]
        if self._failure is not None:
            raise self._failure


def collate(tokens: Tokens, rows: NDArray[np.int64]) -> TokenBatch:
    """Gather the tokens of ``rows`` into a batch."""
    taken = tokens.take(rows)
    weights = None if taken.weights is None else torch.from_numpy(np.array(taken.weights))
    return TokenBatch(
        ids=torch.from_numpy(taken.ids.astype(np.int64)),
        offsets=torch.from_numpy(taken.offsets),
        longest=int(taken.lengths.max(initial=0)),
        weights=weights,
    )


def padded_length(most: int, longest: int) -> int:
    """Return one of few lengths that holds ``most`` tokens, ``longest`` at most.

    These are multiples of 8, or of a quarter of the next power of two.

    >>> [padded_length(most, 512) for most in (0, 8, 9, 60, 65, 300)]
    [8, 8, 16, 64, 96, 384]
    """
    most = max(1, most)
    multiple = max(_LENGTH_MULTIPLE, 1 << (most - 1).bit_length() >> 2)
    return min(-(-most // multiple) * multiple, longest)


def rectangle(
    tokens: Tokens,
    rows: NDArray[np.int64],
    *,
    pad_id: int,
    longest: int,
    n_rows: int | None = None,
) -> Rectangle:
    """Gather the tokens of ``rows``, padded to one of few lengths; see `padded_length`.

    With ``n_rows``, empty texts come after them, so that there are as many.

    >>> from elias.text.tokens import Tokens
    >>> texts = Tokens(offsets=np.array([0, 2, 3]), ids=np.array([5, 6, 7], dtype=np.int32))
    >>> rectangle(texts, np.array([1, 0]), pad_id=0, longest=32).ids[:, :3].tolist()
    [[7, 0, 0], [5, 6, 0]]
    """
    taken = tokens.take(rows)
    lengths = taken.lengths
    if n_rows is not None:
        lengths = np.pad(lengths, (0, n_rows - len(rows)))
    width = padded_length(int(lengths.max(initial=0)), longest)
    ids = np.full((len(lengths), width), pad_id, dtype=np.int64)
    ids[np.arange(width) < lengths[:, None]] = taken.ids
    full = bool((lengths == width).all())
    return Rectangle(torch.from_numpy(ids), torch.from_numpy(lengths), full)


def positives_of(labels: csr_matrix, rows: NDArray[np.int64]) -> Int[Tensor, "B Y"]:
    """Return each row's label ids, ascending, padded with ``n_labels``; Y is at least 1."""
    n_labels = labels.shape[1]
    counts = labels.indptr[rows + 1] - labels.indptr[rows]
    padded = np.full((len(rows), max(1, int(counts.max(initial=0)))), n_labels, dtype=np.int64)
    inside = np.arange(padded.shape[1]) < counts[:, None]
    places = (labels.indptr[rows].astype(np.int64)[:, None] + np.arange(padded.shape[1]))[inside]
    padded[inside] = labels.indices[places]
    padded.sort(axis=1)
    return torch.from_numpy(padded)


def shuffled_batches(
    lengths: NDArray[np.int64], batch_size: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield every row once, in random batches whose texts are of like length."""
    order = rng.permutation(len(lengths))
    window = batch_size * _LIKE_LENGTH_BATCHES
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches.extend(part[i : i + batch_size] for i in range(0, len(part), batch_size))
    for i in rng.permutation(len(batches)):
        yield batches[i]


def ordered_batches(lengths: NDArray[np.int64], batch_size: int) -> Iterator[NDArray[np.int64]]:
    """Yield every row once, shortest texts first: the least padding."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def n_batches(n_rows: int, batch_size: int) -> int:
    """Return how many batches `shuffled_batches` makes."""
    window = batch_size * _LIKE_LENGTH_BATCHES
    whole, rest = divmod(n_rows, window)
    return whole * _LIKE_LENGTH_BATCHES + -(-rest // batch_size)
