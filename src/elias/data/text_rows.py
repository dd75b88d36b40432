"""Deprecated module: import `TextFile` from ``elias``. It will be removed in version 0.3."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name that has moved to ``elias``, and warn that this module is deprecated."""
    from elias.data.readers import text_rows

    if not hasattr(text_rows, name) or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} has moved: import it from elias", DeprecationWarning, stacklevel=2)
    return getattr(text_rows, name)
