"""Choose the columns of a table that hold texts and labels, by their names and content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

from elias.data.readers.base import ReadOptions
from elias.data.readers.files import data_error
from elias.errors import DataError, did_you_mean

TEXT_COLUMNS = (
    *("text", "texts", "title", "content", "input", "sentence", "document", "body", "abstract"),
    *("description", "query", "question", "review", "comment", "message", "headline", "summary"),
    *("overview", "plot", "synopsis", "tweet", "post", "article", "passage", "utterance"),
    "caption",
)
"""Common names of text columns. If no such column looks like text, the first one is read."""

LABEL_COLUMNS = (
    *("labels", "label", "tags", "tag", "categories", "category", "topics", "topic", "targets"),
    *("target", "classes", "class", "subjects", "keywords", "genres", "genre", "label_names"),
    *("subject_uris", "target_ind", "label_ids", "codes", "annotations", "output", "y"),
)
"""Common names of the labels column, in order of preference."""
# the names before this one are also recognised as the last word of a name, such as news_category
_LABEL_WORDS = LABEL_COLUMNS.index("label_names")

IDS, WEIGHTS, SPLIT = "label_ids", "label_weights", "split"
_COMMON = {*TEXT_COLUMNS, *LABEL_COLUMNS, WEIGHTS, SPLIT, "id"}
_NOT_TEXT = re.compile(  # numbers and dates, URLs, hexadecimal ids, lists
    r"[\d\s.,:/+%$€-]*\d[\d\s.,:/+%$€-]*(?:T[\d:.Z+-]+)?|(?:https?:|www\.)\S+|[0-9a-fA-F-]{8,}"
    r"|\[.*\]|\{.*\}",
    re.DOTALL,
)
_WORD_ENDS = re.compile(r"[\W_]+")
_NAME_WORDS = 8  # a cell with more words is not the name of a column
_PROSE_WORDS = 3  # minimum mean number of words in a column of prose
TRUE_CELLS, FALSE_CELLS = ("1", "1.0", "true"), ("0", "0.0", "false", "")
"""Cells of a column of 0 and 1, in lower case. An empty cell is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns to read, by role."""

    text: tuple[str, ...]
    labels: str
    indicators: tuple[str, ...] = ()
    """Columns of 0 and 1, one for each label. If there are any, ``labels`` is empty."""
    ids: str | None = None
    weights: str | None = None
    split: str | None = None
    group: str | None = None

    @property
    def all(self) -> list[str]:
        """Return the names of all columns to read, without duplicates."""
        extra = (self.ids, self.weights, self.split, self.group)
        labels = self.indicators or (self.labels,)
        names = [*self.text, *labels, *(name for name in extra if name is not None)]
        return list(dict.fromkeys(names))


def choose_columns(
    path: Path, sample: Mapping[str, list[Any]], options: ReadOptions
) -> tuple[Columns, list[str]]:
    """Choose the columns that the options name. Choose all others by their names and content.

    Case is ignored in common names. The columns ``label_ids`` and ``label_weights`` are read only
    if the labels column is found by a common name, not if an option names it.

    Args:
        path: The file, for error messages.
        sample: The first cells of each column.
        options: The columns that the user named.

    Returns:
        The columns, and the names of other columns that look like text.
    """
    names, plain, group = list(sample), _plain_names(sample), options.group
    if group is not None:
        check_columns(path, [group], names)
    roles = (plain.get(IDS), plain.get(WEIGHTS), plain.get(SPLIT), group)
    special = [name for name in roles if name is not None]
    named = () if options.labels is None else named_columns(path, options.labels, names)
    left_out: list[str] = []
    if options.text is not None:
        text = named_columns(path, options.text, names)
    else:
        text, left_out = guess_text(path, sample, {*special, *named})
    labels = named or _guess_labels(path, sample, {*special, *text})
    chosen = Columns(text=text, labels=labels[0], split=plain.get(SPLIT), group=group)
    if len(labels) > 1:
        chosen = replace(chosen, labels="", indicators=labels)
    elif options.labels is None:
        ids = None if plain.get(IDS) == labels[0] else plain.get(IDS)
        chosen = replace(chosen, ids=ids, weights=plain.get(WEIGHTS))
    return chosen, left_out


def named_columns(path: Path, value: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that an option names: one, or several separated by commas."""
    columns = (value,) if value in names else tuple(part.strip() for part in value.split(","))
    check_columns(path, columns, names)
    return columns


def _guess_labels(path: Path, sample: Mapping[str, list[Any]], taken: set[str]) -> tuple[str, ...]:
    """Return the labels column, or several columns of 0 and 1."""
    plain = _plain_names(sample)
    common = next((plain[name] for name in LABEL_COLUMNS if name in plain), None)
    if common is not None:
        return (common,)
    free = {name: cells for name, cells in sample.items() if name and name not in taken}
    flag_cells = {*TRUE_CELLS, *FALSE_CELLS} - {""}
    plain_cells = {n: {str(cell).strip().lower() for cell in cells} for n, cells in free.items()}
    flags = [name for name, cells in plain_cells.items() if cells and cells <= flag_cells]
    if len(flags) > 1:
        return tuple(flags)
    similar = [name for name in free if _last_words(name) & {*LABEL_COLUMNS[:_LABEL_WORDS]}]
    if len(similar) == 1:
        return tuple(similar)
    if list(sample) == numbered_columns(len(sample)):  # no header: choose a column that repeats
        repeated = [
            name
            for name, cells in free.items()
            if len(set(map(str, cells))) <= 0.8 * len(cells) and not _is_prose(cells)
        ]
        if len(repeated) == 1:
            return tuple(repeated)
    raise _no_column(path, "labels", list(sample))


def guess_text(
    path: Path, sample: Mapping[str, list[Any]], taken: set[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the columns that look like text, and others that might be text.

    Columns with common names are preferred. Without any, all columns of prose are chosen.
    """
    free = {name: cells for name, cells in sample.items() if name and name not in taken}
    common = [name for name in free if not _last_words(name).isdisjoint(TEXT_COLUMNS)]
    prose = [name for name in free if _is_prose(free[name])]
    prose = [name for name in prose if name.strip().lower() not in LABEL_COLUMNS]
    chosen: list[str] = []
    for name in sorted(common, key=lambda name: name.strip().lower() not in TEXT_COLUMNS):
        is_new = not any(_are_similar(free[name], free[other]) for other in chosen)
        chosen += [name] if is_new and _is_text(free[name]) else []
    chosen.sort(key=list(free).index)
    if not chosen:
        exact = _plain_names(common)
        chosen = [exact[name] for name in TEXT_COLUMNS if name in exact][:1] or prose
    if not chosen:
        raise _no_column(path, "text", list(sample))
    return tuple(chosen), [name for name in free if name in {*common, *prose} - {*chosen}]


def _last_words(name: str) -> set[str]:
    """Return a column name, its last word, and this word without a final s."""
    plain = name.strip().lower()
    last = _WORD_ENDS.split(plain)[-1]
    return {plain, last, last.removesuffix("s")}


def _are_similar(cells: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if most cells of two columns are equal, such as title and original_title."""
    return bool(sum(map(eq, cells, others)) > 0.5 * len(cells))


def _is_text(cells: Sequence[Any]) -> bool:
    """Return True if cells look like texts.

    Return False if all are empty, if most are numbers, dates, URLs or ids, or if most are equal.
    """
    values = [value.strip() for value in cells if isinstance(value, str) and value.strip()]
    n_odd = sum(_NOT_TEXT.fullmatch(value) is not None for value in values)
    is_varied = len(values) < 20 or len(set(values)) > 0.1 * len(values)
    return len(values) - n_odd > n_odd and is_varied


def _is_prose(cells: Sequence[Any]) -> bool:
    """Return True if cells are texts of several words that rarely repeat."""
    values = [value for value in cells if isinstance(value, str) and value.strip()]
    n_words = sum(len(value.split()) for value in values)
    is_distinct = len(set(values)) >= 0.5 * len(values)
    return _is_text(cells) and n_words >= _PROSE_WORDS * len(values) and is_distinct


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    return {name.strip().lower(): name for name in reversed(list(names))}


def numbered_columns(count: int) -> list[str]:
    """Return the names of the columns of a file without a header."""
    return [str(number) for number in range(1, count + 1)]


def _no_column(path: Path, role: str, names: Sequence[str]) -> DataError:
    """Return the error for a table in which no column of texts or labels is recognised."""
    columns = ", ".join(map(repr, names))
    problem = f"no {role} column among {columns}; name one with {role}="
    if list(names) == numbered_columns(len(names)):
        problem = f"no header, and no {role} column is recognised; give {role}=NUMBER"
        problem += f", from 1 to {len(names)}"
    return data_error(path, problem)


def check_columns(path: Path, wanted: Iterable[str], names: Sequence[str]) -> None:
    """Raise `DataError` if a wanted column does not exist."""
    for name in wanted:
        if name not in names:
            columns = ", ".join(map(repr, names))
            hint = did_you_mean(name, names) or "; choose one of these"
            raise data_error(path, f"no column {name!r} among {columns}{hint}")


def is_header(rows: Sequence[Sequence[str]], options: ReadOptions) -> bool:
    """Return whether the first row of a table is a header, given its first rows.

    It is a header if a cell is a column that ``options`` name, or a common column name that is not
    repeated below. Otherwise it is a header unless a cell is a number, a date, a URL or a long
    text, or is repeated below.
    """
    if options.header is not None:
        return options.header
    first, *rest = rows or [[]]
    below = list(zip(*(row for row in rest if len(row) == len(first)), strict=True))
    repeats = [bool(cell) and cell in cells for cell, cells in zip(first, below, strict=False)]
    if not rest or not repeats:
        return True
    wanted = {options.labels, options.group, *(options.text or "").split(",")}
    for cell, is_repeated in zip(first, repeats, strict=True):
        if (cell and cell in wanted) or (cell.lower() in _COMMON and not is_repeated):
            return True
    return not any(
        is_repeated or _NOT_TEXT.fullmatch(cell) or len(cell.split()) > _NAME_WORDS
        for cell, is_repeated in zip(first, repeats, strict=True)
    )
