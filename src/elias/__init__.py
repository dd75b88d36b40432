"""ELIAS: extreme multi-label classification with an index that is learned end to end.

Public names are imported on first use, so that ``import elias`` stays fast and light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elias.config import EliasConfig
    from elias.data import Corpus, Split, convert, corpus_stats, load_corpus
    from elias.errors import EliasError
    from elias.estimator import EliasClassifier
    from elias.inference.batch_predict import FileDone, FileTask, predict_file
    from elias.inference.predictor import Elias
    from elias.inference.prune import EdgeCount, prune_edges
    from elias.metrics import Metrics, evaluate
    from elias.persistence.onnx_runtime import OnnxModel
    from elias.predictions import Predictions, Ranking
    from elias.training.trainer import train, train_together

    __version__: str

_HOMES = {
    "Corpus": "elias.data.corpus",
    "EdgeCount": "elias.inference.prune",
    "Elias": "elias.inference.predictor",
    "EliasClassifier": "elias.estimator",
    "EliasConfig": "elias.config",
    "EliasError": "elias.errors",
    "FileDone": "elias.inference.batch_predict",
    "FileTask": "elias.inference.batch_predict",
    "Metrics": "elias.metrics",
    "OnnxModel": "elias.persistence.onnx_runtime",
    "Predictions": "elias.predictions",
    "Ranking": "elias.predictions",
    "Split": "elias.data.corpus",
    "convert": "elias.data.writers",
    "corpus_stats": "elias.data.stats",
    "evaluate": "elias.metrics",
    "load_corpus": "elias.data.load",
    "predict_file": "elias.inference.batch_predict",
    "prune_edges": "elias.inference.prune",
    "train": "elias.training.trainer",
    "train_together": "elias.training.trainer",
}

__all__ = [
    "Corpus",
    "EdgeCount",
    "Elias",
    "EliasClassifier",
    "EliasConfig",
    "EliasError",
    "FileDone",
    "FileTask",
    "Metrics",
    "OnnxModel",
    "Predictions",
    "Ranking",
    "Split",
    "__version__",
    "convert",
    "corpus_stats",
    "evaluate",
    "load_corpus",
    "predict_file",
    "prune_edges",
    "train",
    "train_together",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names and what is loaded already."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("elias-xmc")
    except PackageNotFoundError:  # a source tree that was not installed
        return "0+source"
