"""Made-up words that can be pronounced: every number is a different word."""

from __future__ import annotations

import numpy as np

_SYLLABLES = np.array([c + v for c in "bcdfghjklmnprstvz" for v in "aeiou"], dtype="S2")
_SCATTER = 48_271
"""Coprime to the number of syllables: neighbouring numbers become unlike words."""


def pseudowords(start: int, stop: int, min_syllables: int = 2) -> list[str]:
    """Return the words of the numbers ``start`` … ``stop - 1``; low numbers give short words.

    >>> pseudowords(1, 4)
    ['vepi', 'sija', 'pobo']
    >>> len(set(pseudowords(0, 10_000)))
    10000
    """
    words: list[str] = []
    n_syllables, first = min_syllables, 0
    while start < stop:
        end = first + len(_SYLLABLES) ** n_syllables
        words += _words_of(np.arange(start, min(stop, end)) - first, n_syllables)
        start = max(start, min(stop, end))
        first, n_syllables = end, n_syllables + 1
    return words


def _words_of(numbers: np.ndarray, n_syllables: int) -> list[str]:
    """Write numbers as ``n_syllables`` digits to the base of the syllables, scattered first."""
    base = len(_SYLLABLES)
    numbers = numbers.astype(np.int64) * _SCATTER % base**n_syllables
    digits = numbers[:, None] // base ** np.arange(n_syllables) % base  # (n, n_syllables)
    joined = np.ascontiguousarray(_SYLLABLES[digits]).view(f"S{2 * n_syllables}")
    return joined.ravel().astype(str).tolist()
