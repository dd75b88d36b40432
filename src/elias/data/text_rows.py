"""Deprecated module: import `TextFile` from ``elias``. It will be removed in version 0.3."""

import elias

__getattr__ = elias._moved(__name__, "TextFile")
