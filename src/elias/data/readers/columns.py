"""Choose the text and label columns of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elias.data.readers.files import data_error
from elias.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elias.data.readers.base import ReadOptions


TEXT = (
    *("text", "texts", "title", "content", "input", "sentence", "document", "body", "abstract"),
    *("description", "query", "question", "review", "comment", "message", "headline", "summary"),
)
"""Common names of the text column, in order of preference."""

LABELS = (
    *("labels", "label", "tags", "tag", "categories", "category", "topics", "topic", "targets"),
    *("target", "classes", "class", "subjects", "keywords", "genres", "genre", "label_names"),
    *("target_ind", "label_ids", "codes", "annotations", "output", "y"),
)
"""Common names of the labels column, in order of preference."""

IDS, WEIGHTS, SPLIT = "label_ids", "label_weights", "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns to read, by role."""

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


def choose_columns(path: Path, names: Sequence[str], options: ReadOptions) -> Columns:
    """Choose the columns that the options name, else columns with common names (ignoring case).

    The columns ``label_ids`` and ``label_weights`` are read only if the labels column is found by
    a common name. They are ignored if the options name the labels column.
    """
    plain = _plain_names(names)
    text = choose_text(path, names, options.text)
    if options.labels is not None:
        labels = _existing(path, options.labels, names)
        return Columns(text=text, labels=labels, split=plain.get(SPLIT))
    labels = _common(path, "labels", LABELS, names)
    ids = plain.get(IDS)
    return Columns(
        text=text,
        labels=labels,
        ids=None if ids == labels else ids,
        weights=plain.get(WEIGHTS),
        split=plain.get(SPLIT),
    )


def choose_text(path: Path, names: Sequence[str], text: str | None) -> tuple[str, ...]:
    """Return the text columns that ``text`` lists, or, if None, a column with a common name."""
    if text is None:
        return (_common(path, "text", TEXT, names),)
    if text in names:
        return (text,)
    return tuple(_existing(path, part.strip(), names) for part in text.split(","))


def _plain_names(names: Sequence[str]) -> dict[str, str]:
    return {name.strip().lower(): name for name in reversed(names)}


def _existing(path: Path, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise missing_column(path, name, names)
    return name


def _common(path: Path, role: str, common: Sequence[str], names: Sequence[str]) -> str:
    plain = _plain_names(names)
    for name in common:
        if name in plain:
            return plain[name]
    columns = ", ".join(map(repr, names))
    raise data_error(path, f"no {role} column among {columns}; name one with {role}=")


def missing_column(path: Path, name: str, names: Sequence[str]) -> DataError:
    """Return the error for a column that does not exist."""
    columns = ", ".join(map(repr, names))
    return data_error(path, f"no column {name!r} among {columns}{did_you_mean(name, names)}")
