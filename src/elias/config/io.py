"""Read and write configurations: TOML and JSON files, presets, ``key=value`` overrides."""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from elias.errors import ConfigError, did_you_mean

T = TypeVar("T")


def read_tree(path: str | Path) -> dict[str, Any]:
    """Read a configuration file as a nested dict, without checking its keys."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers with too many digits
        language = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: not valid {language}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a table of keys, not a {type(tree).__name__}")
    tree.pop("format_version", None)
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` laid on top, tables key by key, anything else whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``key=value``, reading the value as TOML where that works and as a string else."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write it as key=value, e.g. index.beta=75")
    try:
        return key.strip(), tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return key.strip(), None if value.strip() in ("none", "null") else value.strip()


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one existing key of a nested dict, e.g. ``index.beta`` or ``stages.stage2.epochs``."""
    *path, last = dotted.split(".")
    node: Any = tree
    for i, part in enumerate(path):
        node = _child(node, part, ".".join(path[: i + 1]))
    if isinstance(node, list):
        raise ConfigError(f"unknown key {dotted!r}; name one of its fields, e.g. {dotted}.epochs")
    if last not in node:
        raise ConfigError(f"unknown key {dotted!r}{_near_key(dotted, last, node)}")
    node[last] = value


def _child(node: Any, part: str, where: str) -> Any:
    if isinstance(node, list):
        names = [stage["name"] for stage in node]
        if part in names:
            return node[names.index(part)]
        if part.isdecimal() and int(part) < len(node):
            return node[int(part)]
        raise ConfigError(f"unknown stage {where!r}; stages are: {', '.join(names)}")
    if not isinstance(node, dict) or not isinstance(node.get(part), dict | list):
        known = node if isinstance(node, dict) else {}
        raise ConfigError(f"unknown key {where!r}{_near_key(where, part, known)}")
    return node[part]


def _near_key(dotted: str, part: str, known: Mapping[str, Any]) -> str:
    hint = did_you_mean(part, known)
    prefix = dotted[: len(dotted) - len(part)]
    return hint.replace("'", f"'{prefix}", 1) if hint else f" (known: {', '.join(known)})"


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Turn a nested mapping into the dataclass ``cls``, naming every unknown key at once."""
    unknown = list(_unknown_keys(cls, tree, ""))
    if unknown:
        raise ConfigError("; ".join(unknown))
    return _build(cls, tree, "")


def _unknown_keys(hint: Any, value: Any, where: str) -> Iterator[str]:
    """Yield a message for each key below ``value`` that no dataclass in ``hint`` has."""
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _unknown_keys(get_args(hint)[0], item, f"{where}{i}.")
    if not is_dataclass(hint) or not isinstance(value, Mapping):
        return
    hints = get_type_hints(hint)
    for key, child in value.items():
        if key in hints:
            yield from _unknown_keys(hints[key], child, f"{where}{key}.")
        else:
            yield f"unknown key {where + key!r}{_near_key(where + key, key, hints)}"


def _build(cls: type[T], tree: Mapping[str, Any], where: str) -> T:
    """Turn a nested mapping into ``cls``; ``where`` is the dotted path for error messages."""
    hints = get_type_hints(cls)
    return cls(**{key: _convert(hints[key], value, where + key) for key, value in tree.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return _convert(inner, value, where)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            near = did_you_mean(str(value), get_args(hint))
            raise ConfigError(f"{where} must be one of {choices}, not {value!r}{near}")
        return value
    if origin is tuple:
        return _convert_tuple(get_args(hint), value, where)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table of keys, not {value!r}")
        return _build(typing.cast("type[Any]", hint), value, where + ".")
    return _convert_scalar(hint, value, where)


def _convert_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, not {value!r}")
    inner = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(inner) != len(value):
        raise ConfigError(f"{where} must have {len(inner)} values, not {len(value)}")
    pairs = zip(inner, value, strict=True)
    return tuple(_convert(hint, item, f"{where}.{i}") for i, (hint, item) in enumerate(pairs))


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be {_ARTICLE[hint]}, not {value!r}")
    return value


_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


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
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, names)} (presets: {known})")
    return (_folder() / f"{name}.toml").read_text(encoding="utf8")


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
