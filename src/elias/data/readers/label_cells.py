"""Label cells of a table → ids: lists or separated strings, of names or of numbers.

A cell in brackets is a list whatever the others are; what separates labels in the others is decided
over the whole table. So is what the labels are:

* With a file of label names beside the table, whole numbers are row numbers of that file (from
  0) and anything else must be one of its names.
* Without one, each distinct value is a label. Names are sorted; when every value is a whole
  number, they are sorted as numbers and each number is its label's name (ids may have gaps).
* With a ``label_ids`` column beside the names, the ids are given, and names may repeat.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.readers.files import too_many_labels
from elias.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Locate = Callable[[int, str], DataError]
    """Makes the error for a row of the table: (row, problem) → the error to raise."""

_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")
_ID = re.compile(r"0|[1-9][0-9]{0,7}")
"""An id that labels can be counted by, when it comes without a file of names."""
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_NO_COMMA = re.compile(r"""['"]\s+['"]""")
_TWO_PAIRS = re.compile(r"\([^()]*\).*\(.*\)", re.DOTALL)
_STRONG = ("|", ";", "\t")
_STRONG_SHARE = 0.05
"""A ``|``, ``;`` or tab in this share of the cells separates, whatever the commas do."""


@dataclass(frozen=True, slots=True)
class LabelLists:
    """Each row's labels, flattened."""

    counts: NDArray[np.int64]
    """(N,) how many labels each row has."""
    values: list[str]
    """All of them, row after row."""

    def row_of(self, entry: int) -> int:
        """Return the row that the flattened entry stands in."""
        return int(np.searchsorted(np.cumsum(self.counts), entry, side="right"))


@dataclass(frozen=True, slots=True)
class LabelIds:
    """Each row's labels as ids, and the names of all labels."""

    ids: NDArray[np.int64]
    names: list[str]


def detect_separator(cells: Sequence[object], locate: Locate) -> str:
    r"""Return what separates the labels in plain string cells, those that are no lists.

    ``|``, ``;`` or tab win where they stand in a fair share of the plain cells (names often hold
    commas); else a comma; else white space between whole numbers; else nothing (an empty string).
    Nothing either where as many cells are lists as are plain: there a plain cell is one label.
    """
    votes = SeparatorVotes()
    votes.add(cells, locate)
    return votes.winner()


class SeparatorVotes:
    """What the cells of a column say about the separator, a chunked at a time; see above."""

    def __init__(self) -> None:
        self._found = dict.fromkeys((*_STRONG, ","), 0)
        self._n_plain = 0
        self._n_lists = 0
        self._any_listed = False
        self._all_numbers = True
        self._any_spaced = False

    def add(self, cells: Sequence[object], locate: Locate) -> None:
        """Count some cells; refuse the first of all that looks like a list if it is none."""
        for row, cell in enumerate(cells):
            if not isinstance(cell, str):
                self._n_lists += isinstance(cell, list | tuple) and len(cell) > 0
            elif _looks_like_list(cell):
                if not self._any_listed and _parse_list(cell) is None:
                    raise _not_a_list(row, cell, locate)
                self._any_listed = True
                self._n_lists += bool(cell.strip()[1:-1].strip())
            elif cell.strip():
                self._add_plain(cell)

    def _add_plain(self, cell: str) -> None:
        self._n_plain += 1
        for mark in self._found:
            self._found[mark] += mark in cell
        self._all_numbers = self._all_numbers and all(map(_WHOLE.fullmatch, cell.split()))
        self._any_spaced = self._any_spaced or " " in cell.strip()

    def winner(self) -> str:
        """Return the separator."""
        if self._n_plain <= self._n_lists:
            return ""
        found = self._found
        best = max(_STRONG, key=lambda mark: found[mark])
        if found[best] >= max(1, _STRONG_SHARE * self._n_plain):
            return best
        if found[","]:
            return ","
        if found[best]:
            return best
        return " " if self._all_numbers and self._any_spaced else ""


def split_cells(
    cells: Sequence[object],
    separator: str,
    locate: Locate,
    *,
    lists: bool = True,
    keep_empty: bool = False,
) -> LabelLists:
    """Return the labels of every cell.

    Args:
        cells: lists, strings, whole numbers, or None for no label.
        separator: what separates labels in a string; an empty string for one label.
        locate: makes the error for a row.
        lists: whether a string in brackets is a list, as JSON or Python write it.
        keep_empty: whether an empty string in a list is a label too.
    """
    counts = np.zeros(len(cells), dtype=np.int64)
    values: list[str] = []
    for row, cell in enumerate(cells):
        before = len(values)
        if isinstance(cell, str) and not (lists and _looks_like_list(cell)):
            parts = cell.split(separator) if separator else [cell]
            values += [stripped for part in parts if (stripped := part.strip())]
        else:
            names = [_name_of(item, row, locate) for item in _items(cell, row, locate)]
            values += names if keep_empty else filter(None, names)
        counts[row] = len(values) - before
    return LabelLists(counts, values)


def is_missing(cell: object) -> bool:
    """Say whether a cell holds nothing: None, or the NaN that pandas writes for it."""
    return cell is None or (isinstance(cell, float) and cell != cell)


def _items(cell: object, row: int, locate: Locate) -> Sequence[object]:
    if is_missing(cell):
        return []
    if isinstance(cell, str):
        items = _parse_list(cell)
        if items is None:
            raise _not_a_list(row, cell, locate)
        return items
    return cell if isinstance(cell, list | tuple) else [cell]


def _looks_like_list(cell: str) -> bool:
    text = cell.strip()
    if _BRACKETS.get(text[:1]) != text[-1:]:
        return False
    # a name may begin and end with parentheses that are no pair: (R)-carvone (natural)
    return text[0] != "(" or not _TWO_PAIRS.fullmatch(text) or _parse_list(text) is not None


def _not_a_list(row: int, cell: str, locate: Locate) -> DataError:
    remedy = "write a JSON list, or pass separator="
    return locate(row, f"{cell[:60]!r} looks like a list of labels but is not one; {remedy}")


def _parse_list(cell: str) -> list[Any] | None:
    """Return the JSON list, or the Python list, tuple or set, in a cell; or None."""
    text = cell.strip()
    if _BRACKETS.get(text[:1]) != text[-1:]:
        return None
    try:
        if text[0] == "[":
            return list(json.loads(text))
    except RecursionError:
        return None
    except ValueError:
        pass
    if _NO_COMMA.search(text):  # NumPy's spelling, in which Python would join the strings
        return None
    if text[0] == "{":  # as a list, a set keeps its order and a dict is none
        text = f"[{text[1:-1]}]"
    try:
        found = ast.literal_eval(text)  # what pandas writes for a column of lists
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return list(found) if isinstance(found, list | tuple) else None


def _name_of(item: object, row: int, locate: Locate) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, int) and not isinstance(item, bool):
        return str(item)
    if isinstance(item, float) and item.is_integer():
        return str(int(item))
    raise locate(row, f"{item!r:.60} is not a label; labels are names or whole numbers")


def order_names(names: Sequence[str]) -> list[str]:
    """Return distinct names in the order of their ids: as numbers when all are, else as text."""
    if all(_WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


def number_names(lists: LabelLists) -> LabelIds:
    """Give each distinct value an id, in the order of `order_names`."""
    codes, distinct = _codes(lists.values)
    found = number_distinct(distinct)
    return LabelIds(found.ids[codes], found.names)


def number_distinct(distinct: Sequence[str]) -> LabelIds:
    """Return the id of each distinct value, and the values in the order of their ids."""
    names = order_names(distinct)
    id_of = {name: position for position, name in enumerate(names)}
    new = np.fromiter((id_of[name] for name in distinct), np.int64, len(distinct))
    return LabelIds(new, names)


def look_up(lists: LabelLists, names: list[str], locate: Locate) -> LabelIds:
    """Find every value among the given names: as a row number, or as a name."""
    codes, distinct = _codes(lists.values)

    def refuse(code: int, problem: str) -> DataError:
        return locate(lists.row_of(int(np.flatnonzero(codes == code)[0])), problem)

    return LabelIds(find_distinct(distinct, names, refuse)[codes], names)


def find_distinct(distinct: Sequence[str], names: list[str], refuse: Locate) -> NDArray[np.int64]:
    """Return the id of each distinct value; ``refuse`` makes the error for the n-th of them."""
    are_rows = all(_WHOLE.fullmatch(value) for value in distinct)
    find = _row_finder(names) if are_rows else _name_finder(names)
    new = np.zeros(len(distinct), dtype=np.int64)
    for code, value in enumerate(distinct):
        found = find(value)
        if isinstance(found, str):
            raise refuse(code, found)
        new[code] = found
    return new


def _row_finder(names: list[str]) -> Callable[[str], int | str]:
    last = len(names) - 1

    def find(value: str) -> int | str:
        if int(value) <= last:
            return int(value)
        return f"label id {value} is out of range; ids go from 0 to {last}"

    return find


def _name_finder(names: list[str]) -> Callable[[str], int | str]:
    id_of = {name: position for position, name in enumerate(names)}
    times = Counter(names)

    def find(value: str) -> int | str:
        if value not in id_of:
            near = did_you_mean(value, names[:10_000])
            return f"label {value[:60]!r} is not in the file of label names{near}"
        if times[value] > 1:
            return f"label {value[:60]!r} stands {times[value]} times among the names; use row ids"
        return id_of[value]

    return find


def pair_ids(lists: LabelLists, id_lists: LabelLists, locate: Locate) -> LabelIds:
    """Take ids from one column and their names from another; unnamed ids are named by number."""
    ids = checked_ids(lists, id_lists, locate)
    if len(ids) and too_many_labels(int(ids.max()) + 1, len(ids)):
        row = id_lists.row_of(int(ids.argmax()))
        raise locate(row, f"label id {ids.max()} is too large to count labels by; count from 0")
    names = [str(label) for label in range(int(ids.max()) + 1 if len(ids) else 0)]
    named = [False] * len(names)
    for entry, (label, name) in enumerate(zip(ids.tolist(), lists.values, strict=True)):
        if named[label] and names[label] != name:
            raise locate(lists.row_of(entry), two_names(label, names[label], name))
        names[label], named[label] = name, True
    return LabelIds(ids, names)


def two_names(label: int, one: str, other: str) -> str:
    """Say that one id has two names."""
    return f"label id {label} has two names, {one[:40]!r} and {other[:40]!r}"


def checked_ids(lists: LabelLists, id_lists: LabelLists, locate: Locate) -> NDArray[np.int64]:
    """Return the ids beside the labels as numbers, one for each."""
    same_length(lists.counts, id_lists.counts, "label ids", locate)
    wrong = next((i for i, v in enumerate(id_lists.values) if not _ID.fullmatch(v)), None)
    if wrong is not None:
        value = id_lists.values[wrong]
        raise locate(id_lists.row_of(wrong), f"label id {value[:60]!r} is not a small whole number")
    return np.array([int(value) for value in id_lists.values], dtype=np.int64)


def parse_weights(
    cells: Sequence[object], counts: NDArray[np.int64], locate: Locate
) -> NDArray[np.float32]:
    """Return the relevance of every label, from lists beside the labels' lists."""
    values: list[float] = []
    lengths = np.zeros(len(cells), dtype=np.int64)
    for row, cell in enumerate(cells):
        items = _parse_list(cell) if isinstance(cell, str) and cell.strip() else cell
        try:
            numbers = [float(item) for item in items or []]  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise locate(row, f"{cell!r:.60} is not a list of relevance values") from None
        if not all(0 <= number < float("inf") for number in numbers):
            raise locate(row, f"{cell!r:.60}: a relevance must be finite and not negative")
        values += numbers
        lengths[row] = len(numbers)
    same_length(counts, lengths, "relevance values", locate)
    return np.array(values, dtype=np.float32)


def same_length(
    counts: NDArray[np.int64], others: NDArray[np.int64], what: str, locate: Locate
) -> None:
    """Refuse rows whose second list is not as long as their list of labels."""
    wrong = np.flatnonzero(counts != others)
    if len(wrong):
        row = int(wrong[0])
        raise locate(row, f"{counts[row]} labels but {others[row]} {what}; give one for each")


def _codes(values: list[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return each value's number in order of first appearance, and the distinct values."""
    seen: dict[str, int] = {}
    codes = np.fromiter((seen.setdefault(v, len(seen)) for v in values), np.int64, len(values))
    return codes, list(seen)
