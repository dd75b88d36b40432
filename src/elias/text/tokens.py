"""Store tokenized texts as ragged arrays, and cache them on disk by a hash of their content.

Texts on disk are tokenized chunk by chunk. The tokenizer of a transformer has its own threads.
Words and n-grams are looked up in Python, where threads do not help, so several worker processes
tokenize the chunks. The workers are those of loky, a part of joblib. Unlike a ``multiprocessing``
process, a worker of loky does not import the program that calls `elias.train`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from elias.data.atomic import (
    ArrayWriter,
    cache_root,
    find_damage,
    mark_in_use,
    new_cache_entry,
    write_manifest,
)
from elias.data.storage import DiskTexts, scratch_array
from elias.errors import DataError, quoted
from elias.progress import progress, progress_disabled
from elias.text.vectorizer import Featurizer, unit_rows

logger = logging.getLogger(__name__)

_CACHE_LIMIT = 20 * 2**30  # bytes above which the oldest entries are deleted
_FORMAT = 4
_ROWS = 1 << 16  # rows of features scaled at a time
_CHUNK = 8192  # texts on disk tokenized at a time
_TEXTS_PER_WORKER = 50_000  # minimum number of texts for each worker process
_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The concatenated token ids of N texts. Tokens of a bag encoder also have weights."""

    offsets: NDArray[np.int64]
    """(N + 1,) offsets. The tokens of text i are ``ids[offsets[i]:offsets[i + 1]]``."""
    ids: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None
    n_truncated: int = 0
    """Number of texts that were truncated to the maximum length of the encoder."""

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each text (N,)."""
        return np.diff(self.offsets)

    @classmethod
    def from_csr(cls, features: csr_matrix) -> Tokens:
        """Convert a feature matrix. Column indices become token ids, and values become weights."""
        return cls(
            offsets=features.indptr.astype(np.int64),
            ids=features.indices.astype(np.int32, copy=False),
            weights=features.data.astype(np.float32, copy=False),
        )

    @classmethod
    def concatenate(cls, first: Tokens, second: Tokens) -> Tokens:
        """Return the tokens of two lists of texts. Both must have weights, or neither."""
        weights = None
        if first.weights is not None and second.weights is not None:
            weights = np.concatenate([first.weights, second.weights])
        return cls(
            offsets=np.concatenate([first.offsets, first.offsets[-1] + second.offsets[1:]]),
            ids=np.concatenate([first.ids, second.ids]),
            weights=weights,
        )

    def part(self, rows: slice) -> Tokens:
        """Return the tokens of a slice of the texts, without copying them."""
        start, end, _ = rows.indices(len(self))
        inside = slice(int(self.offsets[start]), int(self.offsets[max(start, end)]))
        return Tokens(
            offsets=self.offsets[start : max(start, end) + 1] - inside.start,
            ids=self.ids[inside],
            weights=None if self.weights is None else self.weights[inside],
        )

    def take(self, rows: NDArray[np.int64]) -> Tokens:
        """Return the tokens of ``rows``, in that order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Tokens(
            offsets=offsets,
            ids=self.ids[positions],
            weights=None if self.weights is None else self.weights[positions],
        )


def unit_tokens(features: csr_matrix) -> Tokens:
    """Convert memory-mapped features to tokens, and scale each point to L2 norm 1.

    The scaled weights are stored in a temporary file.
    """
    weights = scratch_array(features.nnz, np.dtype(np.float32))
    for start in range(0, features.shape[0], _ROWS):
        part = unit_rows(features[start : start + _ROWS], first_row=start)
        first = int(features.indptr[start])
        weights[first : first + part.nnz] = part.data
    return replace(Tokens.from_csr(features), weights=weights)


def cache_folder() -> Path:
    """Return the folder of the token cache."""
    return cache_root() / "tokens"


def content_key(fingerprint: str, texts: Sequence[str]) -> str:
    """Return a hash of the tokenizer's fingerprint and of all texts."""
    digest = hashlib.sha256(f"{_FORMAT}\n{fingerprint}\n{len(texts)}\n".encode())
    if isinstance(texts, DiskTexts):
        digest.update(f"on disk {texts.digest}".encode())
    else:
        for text in texts:
            encoded = text.encode("utf8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:40]


def cached(
    fingerprint: str,
    texts: Sequence[str],
    tokenize: Callable[[Sequence[str]], Tokens],
    featurizer: Featurizer | None = None,
    *,
    n_ids: int | None = None,
) -> Tokens:
    """Memory-map the tokens of ``texts`` from the cache. On a miss, tokenize and store them first.

    Damaged tokens are computed again.

    Args:
        fingerprint: A string that identifies the tokenizer.
        texts: The texts.
        tokenize: Function that converts texts to tokens.
        featurizer: The featurizer that ``tokenize`` uses, if any. If it is given, several
            processes can tokenize texts on disk.
        n_ids: Number of token ids of the encoder. If a cached token id is at least this number, the
            cached tokens are damaged.

    Raises:
        DataError: If the tokens of texts on disk cannot be written.
    """
    folder = cache_folder() / content_key(fingerprint, texts)
    tokens = _load(folder, len(texts), n_ids)
    if tokens is not None:
        logger.info("tokens of %d texts read from the cache", len(texts))
        return tokens
    chunks: Iterable[Tokens]
    if isinstance(texts, DiskTexts):
        ranges = [slice(start, start + _CHUNK) for start in range(0, len(texts), _CHUNK)]
        n_workers = min(_n_cores(), len(texts) // _TEXTS_PER_WORKER)
        chunks = (tokenize(texts[rows]) for rows in ranges)
        if featurizer is not None and n_workers > 1:
            chunks = _run_workers(texts, featurizer, ranges, n_workers)
    else:
        tokens = tokenize(texts)
        chunks = [tokens]
    try:
        with new_cache_entry(folder, _CACHE_LIMIT) as staging:
            title = "Storing tokens" if tokens is not None else "Tokenizing"
            with progress(title, len(texts)) as advance, progress_disabled():
                _store(chunks, staging, advance)
            write_manifest(staging, _FORMAT)
    except DataError as error:
        if tokens is None:
            raise
        # a full or read-only disk does not stop the run
        logger.warning("cannot cache tokenized texts: %s", error)
        return tokens
    tokens = _load(folder, len(texts), n_ids) or tokens
    if tokens is None:
        raise DataError(f"{folder}: the new tokens are missing or damaged; run the command again")
    return tokens


def _load(folder: Path, n_texts: int, n_ids: int | None) -> Tokens | None:
    """Memory-map the tokens of a cache entry. Return None if it does not exist or is damaged."""
    if not folder.exists():
        return None
    try:
        if problem := find_damage(folder, _FORMAT, trust_times=True):
            raise ValueError(problem)
        offsets, truncated = (np.load(folder / name) for name in ("offsets.npy", "truncated.npy"))
        mapped = (np.load(folder / name, mmap_mode="r") for name in ("ids.npy", "weights.npy"))
        ids, weights = mapped
        if len(offsets) != n_texts + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError(f"the offsets do not belong to {n_texts} texts")
        if len(ids) != offsets[-1] or len(weights) not in (0, len(ids)):
            raise ValueError("the files are inconsistent")
        lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
        if n_ids is not None and len(ids) and (lowest < 0 or highest >= n_ids):
            raise ValueError(f"token ids range from {lowest} to {highest}, not 0 to {n_ids - 1}")
    except (OSError, ValueError, EOFError, IndexError, TypeError) as error:
        logger.warning("%s: the cached tokens are damaged (%s); tokenizing again", folder, error)
        return None
    mark_in_use(folder)
    has_weights = len(weights) == len(ids)
    return Tokens(offsets, ids, weights if has_weights else None, n_truncated=int(truncated))


def _store(chunks: Iterable[Tokens], folder: Path, advance: Callable[[int], None]) -> None:
    """Write the tokens of consecutive texts into an empty folder, and report the progress."""
    lengths, n_truncated = [np.zeros(1, np.int64)], 0
    with (
        ArrayWriter(folder / "ids.npy", "<i4") as ids,
        ArrayWriter(folder / "weights.npy", "<f4") as weights,
    ):
        for tokens in chunks:
            ids.append(tokens.ids)
            if tokens.weights is not None:
                weights.append(tokens.weights)
            lengths.append(tokens.lengths)
            n_truncated += tokens.n_truncated
            advance(len(tokens))
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "truncated.npy", np.int64(n_truncated))


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_workers(
    texts: DiskTexts, featurizer: Featurizer, ranges: list[slice], n_workers: int
) -> Iterator[Tokens]:
    """Tokenize ranges of the texts in several processes. Yield the tokens of each range."""
    from joblib.externals.loky import ProcessPoolExecutor

    job = (texts.folder, texts.rows, featurizer)
    one_thread = dict.fromkeys(_ONE_THREAD, "1")
    pool = ProcessPoolExecutor(n_workers, initializer=_start, initargs=job, env=one_thread)
    try:
        yield from pool.map(_work, ranges)
    except Exception as error:
        problem = f"a tokenizer process failed ({quoted(error)})"
        raise DataError(f"{problem}; run the same command again") from error
    finally:
        pool.shutdown(kill_workers=True)


_job: tuple[DiskTexts, Featurizer]  # texts and featurizer of a worker process


def _start(folder: Path, rows: NDArray[np.int64] | None, featurizer: Featurizer) -> None:
    """Open the texts when a worker process starts."""
    global _job
    _job = DiskTexts(folder, "", rows), featurizer


def _work(rows: slice) -> Tokens:
    """Tokenize a range of the texts in a worker process."""
    texts, featurizer = _job
    return Tokens.from_csr(featurizer.transform(texts[rows]))
