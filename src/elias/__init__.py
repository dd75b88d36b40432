"""ELIAS: extreme multi-label classification with a label index that is learned end to end.

Each public name is imported when it is first used. This keeps ``import elias`` fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elias.config import EliasConfig
    from elias.data import Corpus, Split, convert, corpus_stats, load_corpus, load_label_table
    from elias.data.load import TextFile
    from elias.distributed import joined
    from elias.errors import EliasError
    from elias.estimator import EliasClassifier
    from elias.inference.batch_predict import FileDone, FileTask, predict_file
    from elias.inference.explain import (
        ExplainedLabel,
        Explanation,
        LabelPath,
        RankerTerm,
        WordEffect,
    )
    from elias.inference.predictor import Elias
    from elias.inference.prune import EdgeCount, prune_edges
    from elias.labels import LabelTable
    from elias.metrics import (
        Metrics,
        evaluate,
        f1_metrics,
        hierarchy_metrics,
        metrics_by_labels,
        metrics_by_points,
    )
    from elias.persistence.onnx_runtime import OnnxModel
    from elias.predictions import Predictions, Ranking
    from elias.rerank.probabilities import Probabilities, calibration_error
    from elias.training.train import train, train_together

    __version__: str

_MODULES = {
    "elias.config": "EliasConfig",
    "elias.data": "Corpus Split convert corpus_stats load_corpus load_label_table",
    "elias.data.load": "TextFile",
    "elias.distributed": "joined",
    "elias.errors": "EliasError",
    "elias.estimator": "EliasClassifier",
    "elias.inference.batch_predict": "FileDone FileTask predict_file",
    "elias.inference.explain": "ExplainedLabel Explanation LabelPath RankerTerm WordEffect",
    "elias.inference.predictor": "Elias",
    "elias.inference.prune": "EdgeCount prune_edges",
    "elias.labels": "LabelTable",
    "elias.metrics": (
        "Metrics evaluate f1_metrics hierarchy_metrics metrics_by_labels metrics_by_points"
    ),
    "elias.persistence.onnx_runtime": "OnnxModel",
    "elias.predictions": "Predictions Ranking",
    "elias.rerank.probabilities": "Probabilities calibration_error",
    "elias.training.train": "train train_together",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Corpus",
    "EdgeCount",
    "Elias",
    "EliasClassifier",
    "EliasConfig",
    "EliasError",
    "ExplainedLabel",
    "Explanation",
    "FileDone",
    "FileTask",
    "LabelPath",
    "LabelTable",
    "Metrics",
    "OnnxModel",
    "Predictions",
    "Probabilities",
    "RankerTerm",
    "Ranking",
    "Split",
    "TextFile",
    "WordEffect",
    "__version__",
    "calibration_error",
    "convert",
    "corpus_stats",
    "evaluate",
    "f1_metrics",
    "hierarchy_metrics",
    "joined",
    "load_corpus",
    "load_label_table",
    "metrics_by_labels",
    "metrics_by_points",
    "predict_file",
    "prune_edges",
    "train",
    "train_together",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULE_OF:
        try:
            value = getattr(import_module(_MODULE_OF[name]), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("elias."):
                raise
            message = f"elias-xmc-runtime has no {name}; install elias-xmc instead"
            raise ImportError(message) from None
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, whether or not they have been imported yet."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("elias-xmc", "elias-xmc-runtime"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return "0+source"  # running from a source tree that is not installed
