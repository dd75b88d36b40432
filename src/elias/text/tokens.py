"""Tokenized texts as ragged arrays, and an on-disk cache of them, keyed by content."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from elias.data.atomic import cache_root, evict_oldest, mark_in_use, staged_folder
from elias.data.storage import DiskTexts, release_pages, scratch_array, track_pages
from elias.errors import DataError
from elias.text.parallel_tokenize import write_tokens
from elias.text.vectorizer import Featurizer, unit_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix


logger = logging.getLogger(__name__)

_CACHE_LIMIT = 20 * 2**30  # bytes; beyond it the oldest entries are deleted
_FORMAT = "3"
_ROWS = 1 << 16  # rows of features scaled at a time


@dataclass(frozen=True, slots=True)
class Tokens:
    """The concatenated token ids of N texts; tokens of a bag encoder also have weights."""

    offsets: NDArray[np.int64]
    """(N + 1,) offsets: the tokens of text i are ``ids[offsets[i]:offsets[i + 1]]``."""
    ids: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None
    n_truncated: int = 0
    """Number of texts that were truncated to the maximum length of the encoder."""

    def __len__(self) -> int:
        """Return N."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each text (N,)."""
        return np.diff(self.offsets)

    @classmethod
    def from_csr(cls, features: csr_matrix) -> Tokens:
        """Convert a feature matrix: stored columns become token ids, and values become weights."""
        return cls(
            offsets=features.indptr.astype(np.int64),
            ids=features.indices.astype(np.int32),
            weights=features.data.astype(np.float32),
        )

    def part(self, rows: slice) -> Tokens:
        """Return a slice of the texts, as views of the same arrays."""
        start, end, _ = rows.indices(len(self))
        inside = slice(int(self.offsets[start]), int(self.offsets[max(start, end)]))
        return Tokens(
            offsets=self.offsets[start : max(start, end) + 1] - inside.start,
            ids=self.ids[inside],
            weights=None if self.weights is None else self.weights[inside],
        )

    def take(self, rows: NDArray[np.int64]) -> Tokens:
        """Return the tokens of ``rows``, in that order."""
        if isinstance(self.ids, np.memmap) or isinstance(self.weights, np.memmap):
            release_pages()
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
    return Tokens(
        offsets=features.indptr.astype(np.int64),
        ids=features.indices.astype(np.int32, copy=False),
        weights=weights,
    )


def cache_folder() -> Path:
    """Return the folder of the token cache."""
    return cache_root() / "tokens"


def content_key(fingerprint: str, texts: Sequence[str]) -> str:
    """Return a hash of the tokenizer and of every text."""
    digest = hashlib.sha256(f"{_FORMAT}\n{fingerprint}\n{len(texts)}\n".encode())
    if isinstance(texts, DiskTexts):
        digest.update(f"on disk {texts.digest}".encode())
        return digest.hexdigest()[:40]
    for text in texts:
        encoded = text.encode("utf8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:40]


def cached(
    fingerprint: str,
    texts: Sequence[str],
    tokenize: Callable[[Sequence[str]], Tokens],
    featurizer: Featurizer | None = None,
) -> Tokens:
    """Memory-map the tokens of ``texts`` from the cache; on a miss, tokenize and store them.

    Args:
        fingerprint: Identifies the tokenizer.
        texts: The texts.
        tokenize: Turns texts into tokens.
        featurizer: The vocabulary that ``tokenize`` uses, if any, so that several processes can
            tokenize texts on disk.

    Raises:
        DataError: If the tokens of texts on disk cannot be written.
    """
    folder = cache_folder() / content_key(fingerprint, texts)
    tokens = _load(folder, len(texts))
    if tokens is not None:
        logger.info("tokens of %d texts read from the cache", len(texts))
        return tokens
    if not isinstance(texts, DiskTexts):
        tokens = tokenize(texts)
    try:
        # a folder that exists is damaged, or another run was faster
        with staged_folder(folder, overwrite=True) as staging:
            if isinstance(texts, DiskTexts):
                write_tokens(texts, staging, tokenize, featurizer)
            elif tokens is not None:
                _store(tokens, staging)
        mark_in_use(folder)
        evict_oldest(folder.parent, _CACHE_LIMIT)
    except (OSError, DataError) as error:
        if tokens is not None:  # a full or read-only disk does not stop the run
            logger.warning("cannot cache tokenized texts in %s: %s", folder, error)
            return tokens
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{folder.parent}: no space for the tokens of {len(texts):,} texts "
            f"({error.strerror}); free some, or set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    tokens = _load(folder, len(texts)) or tokens
    if tokens is None:
        raise DataError(f"{folder}: the new tokens disappeared; run the same command again")
    return tokens


def _load(folder: Path, n_texts: int) -> Tokens | None:
    try:
        offsets = np.load(folder / "offsets.npy", allow_pickle=False)
        ids = np.load(folder / "ids.npy", mmap_mode="r", allow_pickle=False)
        truncated = np.load(folder / "truncated.npy", allow_pickle=False)
        weights = np.load(folder / "weights.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    mark_in_use(folder)
    for array in (ids, weights):
        if isinstance(array, np.memmap):  # an empty array is not mapped
            track_pages(array)
    with suppress(OSError):  # a read-only cache can be used, too
        os.utime(folder)
    complete = len(offsets) == n_texts + 1 and len(ids) == offsets[-1]
    if not complete or len(weights) not in (0, len(ids)):
        return None
    return Tokens(
        offsets=offsets,
        ids=ids,
        weights=weights if len(weights) == len(ids) else None,
        n_truncated=int(truncated),
    )


def _store(tokens: Tokens, folder: Path) -> None:
    np.save(folder / "offsets.npy", tokens.offsets)
    np.save(folder / "ids.npy", tokens.ids)
    np.save(folder / "truncated.npy", np.int64(tokens.n_truncated))
    no_weights = np.empty(0, dtype=np.float32)
    np.save(folder / "weights.npy", no_weights if tokens.weights is None else tokens.weights)
