"""Deprecated module, which will be removed in version 0.3. Import its names from ``elias``."""

from __future__ import annotations

import warnings
from typing import Any

import elias

_MOVED = {"Elias", "EdgeCount", "FileDone", "FileTask", "OnnxModel"}
_MOVED |= {"predict_file", "prune_edges", "train", "train_together"}


def __getattr__(name: str) -> Any:
    """Return a name that has moved to ``elias``, with a deprecation warning."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} has moved: import it from elias", DeprecationWarning, stacklevel=2)
    return getattr(elias, name)
