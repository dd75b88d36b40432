"""Deprecated module: import `TextFile` from ``elias``. It will be removed in version 0.3."""

from __future__ import annotations

import warnings
from typing import Any

import elias


def __getattr__(name: str) -> Any:
    """Return `elias.TextFile`, with a deprecation warning."""
    if name != "TextFile":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} has moved: import it from elias", DeprecationWarning, stacklevel=2)
    return elias.TextFile
