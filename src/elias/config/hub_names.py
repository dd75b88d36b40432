"""Names of models on the Hugging Face hub, and how to tell them from paths."""

from __future__ import annotations

from pathlib import Path

HUB_PREFIX = "hf://"
"""Prefix of the name of a model on the hub: ``hf://user/model@revision``."""


def looks_like_path(name: str) -> bool:
    """Return whether a name is a path, and not ``user/model`` on the hub.

    >>> [looks_like_path(name) for name in ("./model", "~/model", "a/b/c", "user/model", "model")]
    [True, True, True, False, False]
    """
    return (
        name.startswith(("/", ".", "~"))
        or "\\" in name
        or name.count("/") > 1
        or ("/" in name and Path(name).parent.is_dir())
    )
