"""Compare two records of `frozen_run.py`: trees of JSON, and tensors bit for bit."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOLATILE = re.compile(
    r"(.*_)?(seconds|timings|times|loaded_at|started|finished|versions|elapsed|updated)"
)


def say(line: str) -> None:
    """Write a line to stdout."""
    sys.stdout.write(line + "\n")


def parsed(text: str) -> Any:
    """Return JSON, or the list of JSON lines, or the text itself."""
    for read in (json.loads, lambda lines: [json.loads(line) for line in lines.splitlines()]):
        try:
            return without_times(read(text)) if text.strip() else ""
        except ValueError:
            continue
    return text


def without_times(tree: Any) -> Any:
    """Return a tree of JSON without times and versions."""
    if isinstance(tree, dict):
        return {k: without_times(v) for k, v in tree.items() if not VOLATILE.fullmatch(k)}
    return [without_times(item) for item in tree] if isinstance(tree, list) else tree


def digest(text: str | bytes) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def differences(old: Any, new: Any, where: str, tolerance: float) -> Iterator[str]:
    """Yield a line for each difference of two trees of JSON."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if key not in new or key not in old:
                yield f"{where}/{key}: only in {'A' if key in old else 'B'}"
            else:
                yield from differences(old[key], new[key], f"{where}/{key}", tolerance)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{number}]", tolerance)
    elif not equal(old, new, tolerance):
        lines = [v.split("\n") if isinstance(v, str) else [repr(v)] for v in (old, new)]
        changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
        yield "\n    ".join([f"{where}:", *changed])


def equal(old: Any, new: Any, tolerance: float) -> bool:
    """Return whether two values of JSON are equal, floats up to a tolerance."""
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= tolerance * max(1.0, abs(old)) or repr(old) == repr(new)
    return type(old) is type(new) and bool(old == new)


def tensor_differences(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Iterator[str]:
    """Yield a line for each tensor that differs, moved to another file or has another name.

    Keys are ``run|file|name``. Tensors are paired by key, then by run and name with equal bits,
    then by run and name, then by bits alone.
    """
    old, new = dict(old), dict(new)

    def parts(key: str) -> list[str]:
        return key.split("|")[::2]

    for is_pair in (
        lambda a, b: a == b,
        lambda a, b: parts(a) == parts(b) and same(old[a], new[b]),
        lambda a, b: parts(a) == parts(b) and old[a].shape == new[b].shape,
        lambda a, b: same(old[a], new[b]),
    ):
        for a in list(old):
            b = next((b for b in new if is_pair(a, b)), None)
            if b is None:
                continue
            if a != b:
                yield f"layout: tensor {a} is now {b}"
            if not same(old[a], new[b], tolerance):
                yield f"tensor {a}: {describe(old[a], new[b])}"
            del old[a], new[b]
    yield from (f"tensor {a}: only in A" for a in old)
    yield from (f"tensor {b}: only in B" for b in new)


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Return whether tensors are equal bit for bit, or, if floats, up to a tolerance."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))):
        return True
    return tolerance > 0 and a.is_floating_point() and torch.allclose(a, b, tolerance, tolerance)


def describe(a: Any, b: Any) -> str:
    """Return how two tensors differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    return f"{int((a != b).sum())} of {a.numel()} differ, by {(a - b).abs().max().item()} at most"


def compare(a: Path, b: Path, tolerance: float, ignore_layout: bool) -> int:
    """Print every difference of two records; return how many there are."""
    from safetensors.torch import load_file

    n_differences = 0
    for name in sorted({p.name for d in (a, b) for p in d.glob("?.*") if p.is_file()}):
        if not ((a / name).exists() and (b / name).exists()):
            lines = iter([f"only in {'A' if (a / name).exists() else 'B'}"])
        elif name.endswith(".json"):
            old, new = (json.loads((d / name).read_text(encoding="utf8")) for d in (a, b))
            lines = differences(old, new, "", tolerance)
        else:
            lines = tensor_differences(load_file(a / name), load_file(b / name), tolerance)
        for line in lines:
            if not (ignore_layout and re.match(r"/?layout", line)):
                say(f"{name}: {line}")
                n_differences += 1
    say(f"{n_differences} differences" if n_differences else "no difference")
    return n_differences
