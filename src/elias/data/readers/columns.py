"""Which columns of a table hold the text and the labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elias.data.readers.files import bad
from elias.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elias.data.readers.base import ReadOptions


TEXT = (
    *("text", "texts", "title", "content", "input", "sentence", "document", "body", "abstract"),
    *("description", "query", "question", "review", "comment", "message", "headline", "summary"),
)
"""Common names of the text column, best first."""

LABELS = (
    *("labels", "label", "tags", "tag", "categories", "category", "topics", "topic", "targets"),
    *("target", "classes", "class", "subjects", "keywords", "genres", "genre", "label_names"),
    *("target_ind", "label_ids", "codes", "annotations", "output", "y"),
)
"""Common names of the labels column, best first."""

IDS, WEIGHTS, SPLIT = "label_ids", "label_weights", "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """The columns to read, by what they hold."""

    text: tuple[str, ...]
    labels: str
    ids: str | None = None
    weights: str | None = None
    split: str | None = None

    @property
    def all(self) -> list[str]:
        """Return every column once."""
        extra = (self.ids, self.weights, self.split)
        names = [*self.text, self.labels, *(name for name in extra if name is not None)]
        return list(dict.fromkeys(names))


def pick_columns(path: Path, names: Sequence[str], options: ReadOptions) -> Picked:
    """Choose columns by the options, else by common names (whatever their case).

    The columns ``label_ids`` and ``label_weights`` belong to a labels column found by its name;
    they are left alone when another column was asked for.
    """
    plain = _by_plain_name(names)
    text = pick_text(path, names, options.text)
    if options.labels is not None:
        labels = _existing(path, options.labels, names)
        return Picked(text=text, labels=labels, split=plain.get(SPLIT))
    labels = _common(path, "labels", LABELS, names)
    ids = plain.get(IDS)
    return Picked(
        text=text,
        labels=labels,
        ids=None if ids == labels else ids,
        weights=plain.get(WEIGHTS),
        split=plain.get(SPLIT),
    )


def pick_text(path: Path, names: Sequence[str], given: str | None) -> tuple[str, ...]:
    """Return the text column called ``given``, or the several that it lists, else a common one."""
    return _named(path, given, names) or (_common(path, "text", TEXT, names),)


def _by_plain_name(names: Sequence[str]) -> dict[str, str]:
    return {name.strip().lower(): name for name in reversed(names)}


def _named(path: Path, given: str | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return the column called ``given``, or the several that it lists."""
    if given is None:
        return ()
    if given in names:
        return (given,)
    return tuple(_existing(path, part.strip(), names) for part in given.split(","))


def _existing(path: Path, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise no_column(path, name, names)
    return name


def _common(path: Path, role: str, common: Sequence[str], names: Sequence[str]) -> str:
    plain = _by_plain_name(names)
    for name in common:
        if name in plain:
            return plain[name]
    there = ", ".join(map(repr, names))
    raise bad(path, f"no {role} column among {there}; name one with {role}=")


def no_column(path: Path, name: str, names: Sequence[str]) -> DataError:
    """Return the error for a column that is not there."""
    there = ", ".join(map(repr, names))
    return bad(path, f"no column {name!r} among {there}{did_you_mean(name, names)}")
