"""Deprecated module: import `OnnxModel` from ``elias``. It will be removed in version 0.3."""

from elias.pipeline import __getattr__ as __getattr__
