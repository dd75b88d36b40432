"""ELIAS: extreme multi-label classification with a label index that is learned end to end.

Each public name is imported when it is first used. This keeps ``import elias`` fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from elias.config import EliasConfig as EliasConfig
    from elias.data import Corpus as Corpus
    from elias.data import Split as Split
    from elias.data import convert as convert
    from elias.data import corpus_stats as corpus_stats
    from elias.data import load_corpus as load_corpus
    from elias.data import load_label_table as load_label_table
    from elias.data.load import TextFile as TextFile
    from elias.distributed import joined as joined
    from elias.errors import EliasError as EliasError
    from elias.estimator import EliasClassifier as EliasClassifier
    from elias.inference.batch_predict import FileDone as FileDone
    from elias.inference.batch_predict import FileTask as FileTask
    from elias.inference.batch_predict import predict_file as predict_file
    from elias.inference.edit_model import EdgeCount as EdgeCount
    from elias.inference.edit_model import prune_edges as prune_edges
    from elias.inference.explain import ExplainedLabel as ExplainedLabel
    from elias.inference.explain import Explanation as Explanation
    from elias.inference.explain import LabelPath as LabelPath
    from elias.inference.explain import RankerTerm as RankerTerm
    from elias.inference.explain import WordEffect as WordEffect
    from elias.inference.predictor import Elias as Elias
    from elias.labels import LabelTable as LabelTable
    from elias.metrics import Metrics as Metrics
    from elias.metrics import evaluate as evaluate
    from elias.metrics import f1_metrics as f1_metrics
    from elias.metrics import hierarchy_metrics as hierarchy_metrics
    from elias.metrics import metrics_by_labels as metrics_by_labels
    from elias.metrics import metrics_by_points as metrics_by_points
    from elias.persistence.onnx_runtime import OnnxModel as OnnxModel
    from elias.predictions import Predictions as Predictions
    from elias.predictions import Ranking as Ranking
    from elias.rerank.probabilities import Probabilities as Probabilities
    from elias.rerank.probabilities import calibration_error as calibration_error
    from elias.training.train import train as train
    from elias.training.train import train_together as train_together

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
    "elias.inference.edit_model": "EdgeCount prune_edges",
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

__all__ = ["__version__", *sorted(_MODULE_OF)]


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


def _moved(module: str, *names: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a deprecated module, whose names have moved to ``elias``."""

    def find(name: str) -> Any:
        import warnings

        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{name} has moved: import it from elias", DeprecationWarning, stacklevel=2)
        return __getattr__(name)

    return find


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
