"""The presets that ship with the package: one TOML file each, holding what differs from defaults."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from elias.errors import ConfigError, nearest


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    folder = resources.files("elias") / "presets"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def preset_tree(name: str) -> dict[str, Any]:
    """Return the preset's own keys: what differs from the defaults."""
    if name not in preset_names():
        raise ConfigError(
            f"unknown preset {name!r}{nearest(name, preset_names())} "
            f"(presets: {', '.join(preset_names())})"
        )
    text = (resources.files("elias") / "presets" / f"{name}.toml").read_text(encoding="utf8")
    return tomllib.loads(text)


def preset_summary(name: str) -> str:
    """Return the first comment line of a preset: what it is for."""
    text = (resources.files("elias") / "presets" / f"{name}.toml").read_text(encoding="utf8")
    return text.partition("\n")[0].lstrip("# ").strip()
