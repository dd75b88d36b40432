"""Write the tables of `configuration.md` from the configuration's own source.

    python docs/write_configuration.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from elias.config import (
    DEFAULT_STAGES,
    ONE_VS_ALL_STAGES,
    EliasConfig,
    RerankConfig,
    StageConfig,
    schema,
)

PAGE = Path(__file__).parent / "reference" / "configuration.md"
BEGIN, END = "<!-- written by write_configuration.py -->\n", "<!-- end of what is written -->\n"
SECTIONS = {
    "data": schema.DataConfig,
    "encoder": schema.EncoderConfig,
    "index": schema.IndexConfig,
    "loss": schema.LossConfig,
    "stages": StageConfig,
    "rerank": RerankConfig,
    "ensemble": schema.EnsembleConfig,
    "eval": schema.EvalConfig,
    "checkpoint": schema.CheckpointConfig,
    "tracking": schema.TrackingConfig,
}
PLAIN = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}


def page() -> str:
    """Return the page as it should be: its prose, with fresh tables."""
    before, rest = PAGE.read_text(encoding="utf8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return a table of keys for each part of the tree, and what the usual stages change."""
    parts = [_table("", EliasConfig, ["seed"])]
    for name, part in SECTIONS.items():
        parts.append(f"### {name}\n\n{inspect.getdoc(part)}\n")
        where = "stages.NAME" if name == "stages" else name
        parts.append(_table(f"{where}.", part, [field.name for field in fields(part)]))
    parts.append(f"Without stages of your own there are two:\n\n{_listed(DEFAULT_STAGES)}")
    parts.append(f"Or, where every label is scored, one:\n\n{_listed(ONE_VS_ALL_STAGES)}")
    return "\n".join(parts)


def _table(where: str, part: Any, names: list[str]) -> str:
    meanings = _meanings(part)
    defaults = {field.name: field.default for field in fields(part)}
    rows = [
        f"| `{where}{name}` | {kind} | {_shown(defaults[name])} | {meaning} |"
        for name, (kind, meaning) in ((name, meanings[name]) for name in names)
    ]
    return "\n".join(
        ["| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )


def _meanings(part: Any) -> dict[str, tuple[str, str]]:
    """Return the type and the docstring that stand beside each field in the source."""
    (body,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            meaning = " ".join(ast.literal_eval(below.value).split()).replace("``", "`")
            found[ast.unparse(field.target)] = (_kind(ast.unparse(field.annotation)), meaning)
    return found


def _kind(annotation: str) -> str:
    """Return a type as people say it."""
    if choices := re.fullmatch(r"Literal\[(.*)\]", annotation):
        return " or ".join(f"`{ast.literal_eval(choice)}`" for choice in choices[1].split(", "))
    if pair := re.fullmatch(r"tuple\[(\w+), \w+\]", annotation):
        return f"two {PLAIN[pair[1]]}s"
    plain, _, open_end = annotation.partition(" | ")
    return PLAIN[plain] + (" or `none`" if open_end else "")


def _shown(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if value is None:
        return "`none`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _listed(stages: tuple[StageConfig, ...]) -> str:
    plain = StageConfig()
    lines = []
    for stage in stages:
        names = [field.name for field in fields(stage)]
        changed = [n for n in names if getattr(stage, n) != getattr(plain, n) and n != "name"]
        listed = ", ".join(f"`{n}` {_shown(getattr(stage, n))}" for n in changed)
        lines.append(f"- `{stage.name}`: {listed}.\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8", newline="\n")
