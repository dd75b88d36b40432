"""Checks of single values, as every part of the configuration makes them."""

from __future__ import annotations

from elias.errors import ConfigError


def need(condition: bool, message: str) -> None:
    """Refuse a value whose condition does not hold."""
    if not condition:
        raise ConfigError(message)
