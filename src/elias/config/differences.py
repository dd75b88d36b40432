"""What of a configuration decides the result, and how two configurations differ, in a few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITHOUT_EFFECT = ("checkpoint", "tracking")
_RERANK_BEFORE = {"loss": "squared-hinge", "sharpness": 1.0, "names": False}
_ABSENT = "not set"


def decisive(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's tree without what changes nothing in the trained model.

    What was written before a key of the ranker came to be is told what held then.

    >>> decisive({"seed": 1, "checkpoint": {"minutes": 5}})
    {'seed': 1}
    >>> decisive({"rerank": {"enabled": False, "cost": 2.0}})
    {'rerank': {'enabled': False}}
    """
    kept = {key: value for key, value in tree.items() if key not in _WITHOUT_EFFECT}
    rerank = kept.get("rerank")
    if isinstance(rerank, dict):
        off = rerank.get("enabled") is False
        kept["rerank"] = {"enabled": False} if off else {**_RERANK_BEFORE, **rerank}
    return kept


def without_rates(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's tree without the stages' learning rates.

    >>> without_rates({"seed": 1, "stages": [{"name": "stage1", "label_lr": 0.1}]})
    {'seed': 1, 'stages': [{'name': 'stage1'}]}
    """
    stages = tree.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return dict(tree)
    kept = [{k: v for k, v in stage.items() if not k.endswith("_lr")} for stage in stages]
    return {**tree, "stages": kept}


def first_difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Return the first key in which two trees differ with both values; empty where none does.

    >>> first_difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b is 1, there it is 2'
    >>> first_difference({"a": {"b": None}}, {"a": {}})
    'a.b is None, there it is not set'
    """
    if ours == theirs:
        return ""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        pairs = [(key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT)) for key in keys]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [
            (own.get("name", place) if isinstance(own, dict) else place, own, their)
            for place, (own, their) in enumerate(zip(ours, theirs, strict=True))
        ]
    else:
        return f"{path} is {_shown(ours)}, there it is {_shown(theirs)}"
    return next(
        found
        for key, own, their in pairs
        if (found := first_difference(own, their, f"{path}.{key}" if path else str(key)))
    )


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(str(item.get("name")) for item in value)
    return str(value)
