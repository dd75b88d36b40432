"""Collate and pad batches of tokenized texts, prefetch them, and copy them to and from a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from elias.text.tokens import Tokens

T = TypeVar("T")

_LENGTH_MULTIPLE = 8
_MIN_STEP = 64  # minimum of `packed_step`, in tokens
_SORTED_BATCHES = 50  # texts are sorted by length within this many batches


class Batch:
    """Base class of batches, which are dataclasses with tensors and other batches."""

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        return self._map(lambda tensor: to_device(tensor, device))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory, so that copies to a GPU are asynchronous."""
        return self._map(Tensor.pin_memory)

    def _map(self, copy: Callable[[Tensor], Tensor]) -> Self:
        batch: Any = self
        copies: dict[str, Any] = {}
        for field in fields(batch):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                copies[field.name] = copy(value)
            elif isinstance(value, Batch):
                copies[field.name] = value._map(copy)
        copied: Self = replace(batch, **copies)
        return copied


@dataclass(frozen=True, slots=True)
class TokenBatch(Batch):
    """The tokens of B texts, concatenated."""

    ids: Int[Tensor, " tokens"]
    offsets: Int[Tensor, " B+1"]
    longest: int
    """Upper bound of the number of tokens of a text. It is a Python int, so reading it needs no GPU
    sync."""
    weights: Float[Tensor, " tokens"] | None = None
    filled: bool = False
    """True if the texts may be followed by filler tokens, see `fixed_size_batch`."""

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.offsets) - 1

    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of tokens of each text."""
        return self.offsets[1:] - self.offsets[:-1]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A copy to a GPU does not block the host."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class HostCopy(NamedTuple):
    """A tensor that is being copied from a GPU to the host."""

    tensor: Tensor
    done: torch.cuda.Event

    def wait(self) -> Tensor:
        """Return the tensor when the copy is complete."""
        self.done.synchronize()
        return self.tensor


def copy_to_host(tensor: Tensor) -> HostCopy:
    """Start an asynchronous copy of a tensor from a GPU to the host."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensor.device))
    return HostCopy(copy, done)


def prefetch(items: Iterable[T], depth: int = 3) -> Generator[T, None, None]:
    """Yield the items while a background thread produces up to ``depth`` of them in advance.

    Errors of the thread are raised in the caller. The thread ends when the iterator is closed, even
    if items are left.
    """
    iterator = iter(items)
    end: Any = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="elias-prefetch")
    try:
        pending = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def collate(tokens: Tokens, rows: NDArray[np.int64]) -> TokenBatch:
    """Gather the tokens of ``rows`` into a batch."""
    # a single text needs no copy
    taken = tokens if len(rows) == len(tokens.offsets) - 1 == 1 else tokens.take(rows)
    return TokenBatch(
        ids=torch.from_numpy(taken.ids.astype(np.int64)),
        offsets=torch.from_numpy(taken.offsets),
        longest=int(np.diff(taken.offsets).max(initial=0)),
        weights=None if taken.weights is None else torch.from_numpy(np.array(taken.weights)),
    )


def padded_length(n_tokens: int, max_length: int) -> int:
    """Return the padded length of a batch whose longest text has ``n_tokens`` tokens.

    It is a multiple of 8 or, for longer texts, of a quarter of the next power of two, so that there
    are few different lengths. It is at most ``max_length``.

    >>> [padded_length(n, 512) for n in (0, 8, 9, 60, 65, 300)]
    [8, 8, 16, 64, 96, 384]
    """
    n_tokens = max(1, n_tokens)
    multiple = max(_LENGTH_MULTIPLE, 1 << (n_tokens - 1).bit_length() >> 2)
    return min(-(-n_tokens // multiple) * multiple, max_length)


def packed_step(n_tokens: int) -> int:
    """Return the step s: the size of a packed batch is rounded up to a multiple of s tokens.

    It is the largest power of two up to ``n_tokens`` / 32, but at least 64.

    >>> [packed_step(n) for n in (20, 3000, 12_500)]
    [64, 64, 256]
    """
    return max(_MIN_STEP, 1 << n_tokens.bit_length() >> 6)


def fixed_size_batch(
    tokens: Tokens,
    rows: NDArray[np.int64],
    *,
    pad_id: int,
    max_length: int,
    packs: bool,
    n_rows: int | None = None,
) -> TokenBatch:
    """Gather the tokens of ``rows`` into a batch of one of a few sizes, for CUDA graphs.

    Filler tokens follow those of the texts. If ``n_rows`` is given, empty texts are appended until
    the batch has ``n_rows`` texts.

    Args:
        tokens: The tokens of all texts.
        rows: The texts of the batch.
        pad_id: The id of filler tokens.
        max_length: Maximum number of tokens of a text.
        packs: True if the encoder reads the texts without padding. The number of tokens is then
            rounded up to a multiple of `packed_step`. If False, it is the number of texts times
            `padded_length`.
        n_rows: Minimum number of texts.

    >>> texts = Tokens(offsets=np.array([0, 2, 3]), ids=np.array([5, 6, 7], dtype=np.int32))
    >>> batch = fixed_size_batch(texts, np.array([1, 0]), pad_id=0, max_length=32, packs=False)
    >>> batch.ids.tolist(), batch.offsets.tolist(), batch.longest
    ([7, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 3], 8)
    """
    batch = collate(tokens, rows)
    offsets, n_tokens = batch.offsets, len(batch.ids)
    if n_rows is not None:
        offsets = torch.nn.functional.pad(offsets, (0, n_rows - len(rows)), value=n_tokens)
    if packs:
        longest, step = max_length, packed_step(n_tokens)
        size = max(1, -(-n_tokens // step)) * step
    else:
        longest = padded_length(batch.longest, max_length)
        size = (len(offsets) - 1) * longest
    ids = torch.nn.functional.pad(batch.ids, (0, size - n_tokens), value=pad_id)
    return TokenBatch(ids, offsets, longest, filled=size > n_tokens)


def positives_of(labels: csr_matrix, rows: NDArray[np.int64]) -> Int[Tensor, "B Y"]:
    """Return the sorted label ids of each row as (B, Y), padded with L. Y is at least 1."""
    n_labels = labels.shape[1]
    counts = labels.indptr[rows + 1] - labels.indptr[rows]
    padded = np.full((len(rows), max(1, int(counts.max(initial=0)))), n_labels, dtype=np.int64)
    mask = np.arange(padded.shape[1]) < counts[:, None]
    positions = labels.indptr[rows].astype(np.int64)[:, None] + np.arange(padded.shape[1])
    padded[mask] = labels.indices[positions[mask]]
    padded.sort(axis=1)
    return torch.from_numpy(padded)


def shuffled_batches(
    lengths: NDArray[np.int64],
    batch_size: int,
    rng: np.random.Generator,
    *,
    by_length: bool = True,
) -> Iterator[NDArray[np.int64]]:
    """Yield random batches of rows. Each row occurs once.

    With ``by_length``, the texts of a batch have similar lengths, so that they need less padding.
    """
    order = rng.permutation(len(lengths))
    window = batch_size * _SORTED_BATCHES
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        if by_length:
            part = part[np.argsort(lengths[part], kind="stable")]
        batches.extend(part[i : i + batch_size] for i in range(0, len(part), batch_size))
    for i in rng.permutation(len(batches)):
        yield batches[i]


def ordered_batches(lengths: NDArray[np.int64], batch_size: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of rows, sorted by the length of the texts to minimize padding."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def n_batches(n_rows: int, batch_size: int) -> int:
    """Return the number of batches of `shuffled_batches` and `ordered_batches`."""
    return -(-n_rows // batch_size)
