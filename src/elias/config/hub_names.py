"""Distinguish names of models on the Hugging Face hub from paths."""

from __future__ import annotations

from pathlib import Path

HUB_PREFIX = "hf://"
"""Prefix of the name of a model on the hub: ``hf://user/model@revision``."""


def looks_like_path(name: str) -> bool:
    """Return True if a name is a path, False if it may be ``user/model`` on the hub.

    >>> [looks_like_path(name) for name in ("./model", "~/model", "a/b/c", "user/model", "model")]
    [True, True, True, False, False]
    """
    return (
        name.startswith(("/", ".", "~"))
        or "\\" in name
        or name.count("/") > 1
        or ("/" in name and Path(name).parent.is_dir())
    )
