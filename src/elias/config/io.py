"""Load configurations from TOML and JSON files, presets and overrides, and compare them."""

from __future__ import annotations

import copy
import json
import logging
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from elias.errors import ConfigError, did_you_mean, quoted

T = TypeVar("T")
logger = logging.getLogger(__name__)

HUB_PREFIX = "hf://"
"""Prefix of the name of a model on the Hugging Face hub: ``hf://user/model@revision``."""


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


def read_tree(path: str | Path) -> dict[str, Any]:
    """Load a TOML or JSON file as a nested dict, without checking its keys."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({quoted(error)}); check the file") from error
    try:
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers with too many digits
        language = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: not valid {language}: {error}; correct the file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must contain a table of keys, not a {type(tree).__name__}")
    tree.pop("format_version", None)
    return complete_tree(tree) if path.suffix == ".json" else tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``base`` updated by ``over``. Nested tables are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``key=value``; a value that is not valid TOML is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write it as key=value, e.g. index.beta=75")
    try:
        return key.strip(), tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return key.strip(), None if value.strip() in ("none", "null") else value.strip()


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set an existing key of a nested dict, e.g. ``index.beta`` or ``stages.stage2.epochs``."""
    *path, last = dotted.split(".")
    node: Any = tree
    for i, part in enumerate(path):
        node = _child(node, part, ".".join(path[: i + 1]))
    if isinstance(node, list):
        raise ConfigError(f"unknown key {dotted!r}; add the key of a stage, e.g. {dotted}.epochs")
    if last not in node:
        raise ConfigError(f"unknown key {dotted!r}{_key_hint(dotted, last, node)}")
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
        raise ConfigError(f"unknown key {where!r}{_key_hint(where, part, known)}")
    return node[part]


def _key_hint(dotted: str, part: str, known: Mapping[str, Any]) -> str:
    """Return a hint about the unknown key ``dotted``, whose last part is ``part``.

    It names the replacement of a removed key, or the most similar of the ``known`` keys.
    """
    if (key := f"{dotted.partition('.')[0]}.{part}") in _REMOVED | _REPLACED:
        return f", which was removed: {_REPLACED.get(key) or f'it is always {_REMOVED[key]}'}"
    hint = did_you_mean(part, known)
    prefix = dotted[: len(dotted) - len(part)]
    return hint.replace("'", f"'{prefix}", 1) if hint else f" (known: {', '.join(known)})"


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Build the dataclass ``cls`` from a nested mapping.

    Raises:
        ConfigError: If keys are unknown (the message names them all), or if a value has the wrong
            type.
    """
    unknown = list(_unknown_keys(cls, tree, ""))
    if unknown:
        raise ConfigError("; ".join(unknown))
    built: T = _convert(cls, dict(tree), "")
    return built


def _unknown_keys(hint: Any, value: Any, where: str) -> Iterator[str]:
    """Yield a message for each key in ``value`` that is not a field of the dataclass ``hint``."""
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _unknown_keys(get_args(hint)[0], item, f"{where}{_item_key(i, item)}.")
    if not is_dataclass(hint) or not isinstance(value, Mapping):
        return
    hints = get_type_hints(hint)
    for key, child in value.items():
        if key in hints:
            yield from _unknown_keys(hints[key], child, f"{where}{key}.")
        else:
            yield f"unknown key {where + key!r}{_key_hint(where + key, key, hints)}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert a value of a file to the type ``hint``. ``where`` is its key in error messages."""
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return _convert(inner, value, where)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            similar = did_you_mean(str(value), get_args(hint))
            raise ConfigError(f"{where} must be one of {choices}, not {value!r}{similar}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        if len(inner) != len(value):
            raise ConfigError(f"{where} must have {len(inner)} values, not {len(value)}")
        keys = [f"{where}.{_item_key(i, item)}" for i, item in enumerate(value)]
        return tuple(map(_convert, inner, value, keys))
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table of keys, not {value!r}")
        hints, prefix = get_type_hints(hint), f"{where}." if where else ""
        values = {key: _convert(hints[key], item, prefix + key) for key, item in value.items()}
        return typing.cast("type[Any]", hint)(**values)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} must be {_ARTICLE[hint]}, not {value!r}")
    return value


def _item_key(i: int, item: Any) -> str:
    """Return the key of a list item in error messages: its name or, if it has none, its index."""
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else str(i)


_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def preset_names() -> list[str]:
    """Return the names of the presets in the package."""
    names = (entry.name for entry in (resources.files("elias") / "presets").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def preset_tree(name: str) -> dict[str, Any]:
    """Return the keys that a preset sets, as a nested dict."""
    return tomllib.loads(_preset_text(name))


def preset_summary(name: str) -> str:
    """Return the summary of a preset, the first comment line of its file."""
    first_line, _, _ = _preset_text(name).partition("\n")
    return first_line.lstrip("# ").strip()


def _preset_text(name: str) -> str:
    names = preset_names()
    if name not in names:
        known = f"presets: {', '.join(names)}; other settings: --config FILE"
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, names)} ({known})")
    return (resources.files("elias") / "presets" / f"{name}.toml").read_text(encoding="utf8")


def _train_clusters(index: Mapping[str, Any]) -> Any:
    """Return the fixed value of ``index.train_clusters``, or the given one if it has no effect."""
    given, beam_size = index["train_clusters"], index.get("beam_size")
    if given is None or beam_size is None or index.get("kind") == "all":
        return given
    return beam_size + 5


_NO_EFFECT = ("checkpoint", "tracking")  # sections that do not change the model
_OLD_VALUES: dict[str, dict[str, Any]] = {
    "rerank": {"loss": "squared-hinge", "names": False},
    "eval": {"drop_unhelpful": False},
    "loss": {"label_text_weight": 0.0},
}
"""Values assumed for keys that older configurations lack, by section."""
_REMOVED: dict[str, Any] = {
    "encoder.capture": True,
    "encoder.min_count": lambda part: part["min_count"] if part["min_count"] in (None, 1) else 2,
    "index.train_clusters": _train_clusters,
    "stages.warmup": 0.1,
    "stages.max_grad_norm": 0.0,
    "rerank.min_count": 1,
    "rerank.max_features": 1_000_000,
    "rerank.tolerance": 0.1,
    "rerank.max_iterations": 100,
    "rerank.prune": 0.1,
    "rerank.transform": lambda part: "sigmoid" if part.get("loss") == "logistic" else "l3-hinge",
    "rerank.sharpness": None,
    "rerank.tree_depth": 5,
    "rerank.tree_leaf": lambda part: 1 if part.get("trees") == 1 else 20,
    "rerank.mixture": "sum",
    "eval.every": 1,
    "checkpoint.steps": lambda part: part["steps"],  # any value
    "checkpoint.keep": lambda part: part["keep"],  # any value
}
"""Removed keys and their fixed values. A function computes the value from the section of the key.

No removed key affects the predictions of a saved model.
"""
_REPLACED = {
    "encoder.kind": "set encoder.model to bag, minilm, a folder or a hub id",
    "encoder.min_count": "it is always 2, or 1 with fewer than 80 training texts",
    "rerank.transform": "it follows from rerank.loss",
    "rerank.sharpness": "it is chosen on held-out points",
    "rerank.tree_leaf": "it follows from rerank.trees",
    "checkpoint.steps": "use checkpoint.minutes",
    "checkpoint.keep": "it is always 2; checkpoint.minutes=0 writes none",
    "index.train_clusters": "it is always index.beam_size + 5",
    **dict.fromkeys(("eval.propensity_a", "eval.propensity_b"), "use eval.propensity = [A, B]"),
}
"""Replacements of removed keys, for error messages. Other removed keys have a fixed value."""
_ABSENT = "not set"
_OF_EVERY_STAGE = ("bag_lr", "cluster_lr", "edge_lr", "label_lr", "average_from", "keep_encoder")


def complete_tree(tree: Mapping[str, Any], *, drop_removed: bool = False) -> dict[str, Any]:
    """Convert a configuration that an older version of ELIAS saved to the keys of this version.

    Add missing keys. Drop a removed key if it has the value that is now fixed. Keep any other
    removed key, so that `build` reports it as unknown. With ``drop_removed``, drop it, too, and log
    a message.

    >>> complete_tree({"stages": [{"name": "stage1", "max_grad_norm": 0.0}]})["stages"]
    [{'name': 'stage1', 'score_all': False}]
    """
    complete = copy.deepcopy(dict(tree))
    for encoder in _tables(complete, "encoder"):
        if kind := encoder.pop("kind", None):
            encoder["model"] = kind if kind == "bag" else encoder.get("model", "minilm")
    for evaluation in _tables(complete, "eval"):
        if "propensity_a" in evaluation:
            constants = evaluation.pop("propensity_a"), evaluation.pop("propensity_b", None)
            evaluation["propensity"] = list(constants)
    missing: dict[str, dict[str, Any]] = {}
    of_stages: dict[str, Any] = {}
    stages = _tables(complete, "stages")
    # only a file that an older version saved has this key in every stage
    if stages and all("max_grad_norm" in stage for stage in stages):
        scores_all = any(index.get("kind") == "all" for index in _tables(complete, "index"))
        missing, of_stages = _OLD_VALUES, {"score_all": scores_all}
    # only a resolved configuration has all of these values
    is_resolved = all(stage.get(key) is not None for stage in stages for key in _OF_EVERY_STAGE)
    if stages and is_resolved:
        of_stages["label_share"] = 1.0
        missing = missing | {"rerank": {**missing.get("rerank", {}), "choose_cost": False}}
    for section, values in {**missing, "stages": of_stages}.items():
        for table in _tables(complete, section):
            table.update(values | table)
    for name, constant in _REMOVED.items():
        section, key = name.split(".")
        for part in _tables(complete, section):
            if key not in part:
                continue
            if part[key] == (constant(part) if callable(constant) else constant):
                del part[key]
            elif drop_removed:
                logger.info("%s=%s of the saved model is no longer used", name, part.pop(key))
    return complete


def _tables(tree: Mapping[str, Any], section: str) -> list[dict[str, Any]]:
    """Return the table of a section, or its list of tables. `build` reports any other value."""
    value = tree.get(section)
    return [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, dict)]


def model_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration that change the trained model.

    >>> model_settings({"seed": 1, "checkpoint": {"minutes": 5}})
    {'seed': 1}
    >>> model_settings({"rerank": {"enabled": False, "cost": 2.0}})
    {'rerank': {'enabled': False}}
    >>> model_settings({"loss": {"label_text_weight": 0.0}})
    {'loss': {'label_text_weight': 0.0, 'label_contrast': False}}
    """
    tree = complete_tree(tree)
    settings = {key: value for key, value in tree.items() if key not in _NO_EFFECT}
    encoder, loss, rerank = (settings.get(name) for name in ("encoder", "loss", "rerank"))
    if isinstance(encoder, dict):  # older runs have no windows
        settings["encoder"] = {"windows": 1} | encoder
    if isinstance(loss, dict) and loss.get("label_contrast") is None:  # as in older runs
        settings["loss"] = loss | {"label_contrast": loss.get("label_text_weight") != 0}
    if isinstance(rerank, dict) and rerank.get("enabled") is False:
        settings["rerank"] = {"enabled": False}
    return settings


def without_learning_rates(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration tree without the learning rates of the stages.

    >>> without_learning_rates({"seed": 1, "stages": [{"name": "stage1", "label_lr": 0.1}]})
    {'seed': 1, 'stages': [{'name': 'stage1'}]}
    """
    stages = tree.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return dict(tree)
    others = [{k: v for k, v in stage.items() if not k.endswith("_lr")} for stage in stages]
    return {**tree, "stages": others}


def first_difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Describe the first key whose values differ in two trees; return "" if the trees are equal.

    >>> first_difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b is 1 instead of 2'
    >>> first_difference({"a": {"b": None}}, {"a": {}})
    'a.b is None instead of not set'
    """
    if ours == theirs:
        return ""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        entries = [(key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT)) for key in keys]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        entries = [
            (a.get("name", i) if isinstance(a, dict) else i, a, b)
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        ]
    else:
        return f"{path} is {_shown(ours)} instead of {_shown(theirs)}"
    differences = (first_difference(a, b, f"{path}.{k}" if path else str(k)) for k, a, b in entries)
    return next(filter(None, differences))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each leaf of nested dictionaries.

    A list of tables, such as the stages, is indexed by the names of its entries.

    >>> list(leaves({"seed": 1, "stages": [{"name": "stage1", "epochs": 3}]}))
    [(('seed',), 1), (('stages', 'stage1', 'name'), 'stage1'), (('stages', 'stage1', 'epochs'), 3)]
    """
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        tree = {_item_key(i, table): table for i, table in enumerate(tree)}
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def numbers(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each number in nested dictionaries."""
    for path, value in leaves(tree):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(str(item.get("name")) for item in value)
    return str(value)
