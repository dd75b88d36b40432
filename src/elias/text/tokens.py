"""Tokenised texts as ragged arrays, kept on disk by content so that a second run starts at once."""

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
from elias.text.vectorizer import unit_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix


logger = logging.getLogger(__name__)

_CACHE_LIMIT = 20 * 2**30  # bytes of tokenised text kept before the oldest goes
_FORMAT = "3"
_ROWS = 1 << 16  # of features, at a time


@dataclass(frozen=True, slots=True)
class Tokens:
    """N texts as runs of token ids; the bag encoder's tokens have weights too."""

    offsets: NDArray[np.int64]
    """(N + 1,) text i is ``ids[offsets[i]:offsets[i + 1]]``."""
    ids: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None
    n_truncated: int = 0
    """How many texts were longer than the encoder reads."""

    def __len__(self) -> int:
        """Return N."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return each text's number of tokens (N,)."""
        return np.diff(self.offsets)

    @classmethod
    def from_csr(cls, features: csr_matrix) -> Tokens:
        """Take each row's stored columns as its tokens, and the values as their weights."""
        return cls(
            offsets=features.indptr.astype(np.int64),
            ids=features.indices.astype(np.int32),
            weights=features.data.astype(np.float32),
        )

    def part(self, rows: slice) -> Tokens:
        """Return a run of texts, over the same arrays."""
        start, end, _ = rows.indices(len(self))
        inside = slice(int(self.offsets[start]), int(self.offsets[max(start, end)]))
        return Tokens(
            offsets=self.offsets[start : max(start, end) + 1] - inside.start,
            ids=self.ids[inside],
            weights=None if self.weights is None else self.weights[inside],
        )

    def take(self, rows: NDArray[np.int64]) -> Tokens:
        """Return the texts of ``rows``, in that order."""
        release_pages()
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Tokens(
            offsets=offsets,
            ids=self.ids[places],
            weights=None if self.weights is None else self.weights[places],
        )


def unit_tokens(features: csr_matrix) -> Tokens:
    """Return mapped features as tokens, each point scaled to length 1, in a scratch file."""
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
    """Return where tokenised texts are kept: the user's cache folder."""
    return cache_root() / "tokens"


def content_key(fingerprint: str, texts: Sequence[str]) -> str:
    """Return a hash of how the texts are tokenised and of every text."""
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
    tokenise: Callable[[Sequence[str]], Tokens],
    write: Callable[[DiskTexts, Path], None] | None = None,
) -> Tokens:
    """Return the tokens of ``texts``, memory-mapped from disk when they are there already.

    Those of texts on disk are written by ``write``, and never are in memory all at once.
    """
    folder = cache_folder() / content_key(fingerprint, texts)
    found = _load(folder, len(texts))
    if found is not None:
        logger.info("tokens of %d texts found in the cache", len(texts))
        return found
    if isinstance(texts, DiskTexts):
        assert write is not None
        return _written(texts, folder, write)
    tokens = tokenise(texts)
    try:
        _store(tokens, folder)
        mark_in_use(folder)
        evict_oldest(folder.parent, _CACHE_LIMIT)
    except (OSError, DataError) as error:  # a full or read-only disk must not stop the run
        logger.warning("tokenised texts not kept in %s: %s", folder, error)
        return tokens
    return _load(folder, len(texts)) or tokens


def _written(texts: DiskTexts, folder: Path, write: Callable[[DiskTexts, Path], None]) -> Tokens:
    try:
        with staged_folder(folder, overwrite=True) as staging:
            write(texts, staging)
        mark_in_use(folder)
        evict_oldest(folder.parent, _CACHE_LIMIT)
    except OSError as error:
        raise DataError(
            f"{folder.parent}: no room for the tokens of {len(texts):,} texts ({error.strerror}); "
            "free some, or set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    found = _load(folder, len(texts))
    if found is None:
        raise DataError(f"{folder}: the tokens just written are gone; run the same command again")
    return found


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
        if isinstance(array, np.memmap):  # an empty one is not
            track_pages(array)
    with suppress(OSError):  # a read-only cache still serves
        os.utime(folder)
    whole = len(offsets) == n_texts + 1 and len(ids) == offsets[-1]
    if not whole or len(weights) not in (0, len(ids)):
        return None
    return Tokens(
        offsets=offsets,
        ids=ids,
        weights=weights if len(weights) == len(ids) else None,
        n_truncated=int(truncated),
    )


def _store(tokens: Tokens, folder: Path) -> None:
    # one that is there is broken, or another run was quicker
    with staged_folder(folder, overwrite=True) as staging:
        np.save(staging / "offsets.npy", tokens.offsets)
        np.save(staging / "ids.npy", tokens.ids)
        np.save(staging / "truncated.npy", np.int64(tokens.n_truncated))
        no_weights = np.empty(0, dtype=np.float32)
        np.save(staging / "weights.npy", no_weights if tokens.weights is None else tokens.weights)
