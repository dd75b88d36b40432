"""Corpora: reading any format, checking, describing and writing them.

Names are resolved when first used (PEP 562), so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elias.data.corpus import SPLITS, Corpus, Split
    from elias.data.load import load_corpus
    from elias.data.stats import CorpusStats, SplitStats, corpus_stats
    from elias.data.writers import Written, convert

__all__ = [
    "SPLITS",
    "Corpus",
    "CorpusStats",
    "Split",
    "SplitStats",
    "Written",
    "convert",
    "corpus_stats",
    "load_corpus",
]

_HOME = {
    "SPLITS": "corpus",
    "Corpus": "corpus",
    "CorpusStats": "stats",
    "Split": "corpus",
    "SplitStats": "stats",
    "Written": "writers",
    "convert": "writers",
    "corpus_stats": "stats",
    "load_corpus": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
