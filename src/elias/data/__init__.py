"""Read, check, describe and write corpora in any supported format.

Names are imported when they are first used (PEP 562), so that importing this package is fast.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elias.data.corpus import SPLITS as SPLITS
    from elias.data.corpus import Corpus as Corpus
    from elias.data.corpus import Split as Split
    from elias.data.load import load_corpus as load_corpus
    from elias.data.load import load_label_table as load_label_table
    from elias.data.stats import CorpusStats as CorpusStats
    from elias.data.stats import SplitStats as SplitStats
    from elias.data.stats import corpus_stats as corpus_stats
    from elias.data.writers import ConversionResult as ConversionResult
    from elias.data.writers import convert as convert

_MODULES = {
    "corpus": ("SPLITS", "Corpus", "Split"),
    "load": ("load_corpus", "load_label_table"),
    "stats": ("CorpusStats", "SplitStats", "corpus_stats"),
    "writers": ("ConversionResult", "convert"),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    if name == "Written":  # the former name
        message = "Written was renamed: use ConversionResult"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = "ConversionResult"
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
