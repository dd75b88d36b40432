"""Experiments that reproduce the tables of the paper on any corpus."""

import warnings
from typing import Any

from elias.experiments.compare import compare
from elias.experiments.runner import Plan, Result, Setting, run_experiment
from elias.experiments.sweep import prune, sweep
from elias.experiments.variants import ablation

__all__ = ["Plan", "Result", "Setting", "ablation", "compare", "prune", "run_experiment", "sweep"]


def __getattr__(name: str) -> Any:
    """Resolve ``carry_out``, the deprecated name of `run_experiment`, with a warning."""
    if name != "carry_out":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = "elias.experiments.carry_out is now run_experiment; the old name will be removed in 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return run_experiment
