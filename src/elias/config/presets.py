"""The presets that ship with the package: one TOML file each, with what differs from defaults."""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from elias.errors import ConfigError, nearest


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    names = (entry.name for entry in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def preset_tree(name: str) -> dict[str, Any]:
    """Return the preset's own keys: what differs from the defaults."""
    return tomllib.loads(_text(name))


def preset_summary(name: str) -> str:
    """Return the first comment line of a preset: what it is for."""
    first_line, _, _ = _text(name).partition("\n")
    return first_line.lstrip("# ").strip()


def _folder() -> Traversable:
    return resources.files("elias") / "presets"


def _text(name: str) -> str:
    names = preset_names()
    if name not in names:
        known = ", ".join(names)
        raise ConfigError(f"unknown preset {name!r}{nearest(name, names)} (presets: {known})")
    return (_folder() / f"{name}.toml").read_text(encoding="utf8")
