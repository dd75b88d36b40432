"""ELIAS: extreme multi-label classification with an index that is learned end to end.

Public names are resolved when first used, so that ``import elias`` stays fast and light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elias.config import EliasConfig
    from elias.data import load_corpus
    from elias.estimator import EliasClassifier
    from elias.metrics import evaluate
    from elias.pipeline import Elias, train
    from elias.predictions import Predictions

    __version__: str

_HOMES = {
    "Elias": "elias.pipeline",
    "EliasClassifier": "elias.estimator",
    "EliasConfig": "elias.config",
    "Predictions": "elias.predictions",
    "evaluate": "elias.metrics",
    "load_corpus": "elias.data",
    "train": "elias.pipeline",
}

__all__ = [
    "Elias",
    "EliasClassifier",
    "EliasConfig",
    "Predictions",
    "__version__",
    "evaluate",
    "load_corpus",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names beside what is loaded already."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("elias-xmc")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0+source"
