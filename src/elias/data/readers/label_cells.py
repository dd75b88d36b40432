"""Parse the label cells of a table into label ids.

A cell holds names, numbers or objects with a ``name``, as a list or as a separated string. A cell
in brackets is a list. The separator of all other cells is chosen once for the whole table. The
meaning of a label value depends on the other files and columns:

* If there is a file of label names in the folder of the table, whole numbers are row numbers of
  that file (from 0), and any other value must be one of its names.
* If there is no such file, each distinct value is a label. Names are sorted. If every value is a
  whole number, they are sorted as numbers, and each number is the name of its label (the numbers
  may have gaps).
* If the table has a ``label_ids`` column, the ids are read from it, and names may repeat.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from elias.data.readers.base import row_of, too_many_labels
from elias.data.readers.files import data_error
from elias.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from elias.data.readers.table import Rows

    RowError = Callable[[int, str], DataError]
    """Function that takes a row number and a problem, and returns the error for this row."""
    LabelLists = tuple[NDArray[np.int64], list[str]]
    """The number of labels of each row, and the labels of all rows, concatenated."""

_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")
_ID = re.compile(r"0|[1-9][0-9]{0,7}")  # at most 8 digits, since every lower id becomes a label
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_NO_COMMA = re.compile(r"""['"]\s+['"]""")
_TWO_PAIRS = re.compile(r"\([^()]*\).*\(.*\)", re.DOTALL)
_STRONG = ("|", ";", "\t")
_STRONG_SHARE = 0.05
"""Minimum share of cells with a separator in steps 3 and 4 of `SeparatorVotes`."""
_URI = r"(?:<[a-zA-Z][\w+.-]*:[^<>\s]+>|(?:https?|urn):[^<>\s]+)"
_PATTERNS = {
    " ": re.compile(rf"{_URI}(?:\s+{_URI})*"),
    "><": re.compile(r"(?:<[^<>]+>\s*)+"),
    "#": re.compile(r"(?:#[^#\s]+\s*)+"),
}
"""Separators, each with a pattern. A separator is recognised if all cells match the pattern."""
LOOKS = {"><": "<a><b>", "#": "#a #b", " / ": "a / b", " ": "a b"}
"""Examples of cells with a recognised separator, for messages."""
_SAMPLED_CELLS = 50_000  # number of cells whose parts are counted
_MIN_JOINED = 3  # minimum number of distinct cells with a separator to recognise it
_MIN_SORTED = 20  # minimum number of cells to recognise that labels are sorted
_OBJECT_KEYS = ("name", "label", "title", "tag", "term", "text", "value", "uri")


@dataclass(frozen=True, slots=True)
class CellFormat:
    """Format of the labels in a column."""

    separator: str
    """The separator of labels in a string. If it is empty, each string is one label. With ``><``,
    the brackets around the cell are removed."""
    lists: bool = True
    """True if a string in brackets is read as a JSON or Python list."""
    key: str | None = None
    """The key of the name, if labels are objects. If None, it is chosen for each object."""
    any_list: bool = True
    """True if some cells are lists. Otherwise the model records the separator for later files."""

    def describe(self) -> str:
        """Return a description for notes, such as ``, separated by '|'``, or an empty string."""
        if self.key is not None:
            return f", the {self.key!r} of each object"
        if not self.separator:
            return ""
        if self.lists and self.separator in LOOKS:
            look = LOOKS[self.separator]
            return f", whose cells look like {look}: split at {self.separator!r}"
        return f", separated by {self.separator!r}"


class SeparatorVotes:
    r"""Choice of the label separator in plain cells, i.e. string cells that are not lists.

    The first of these separators whose condition is true is chosen:

    1. An empty string, if there are at least as many lists as plain cells. Each plain cell is then
       one label.
    2. A space, ``><`` or ``#``, if all cells look like ``<http://a> <http://b>``, ``<a><b>`` or
       ``#a #b``.
    3. ``|``, ``;`` or tab, if at least `_STRONG_SHARE` of the cells contain it.
    4. A comma, if at least this share of the cells contain it, and commas are not part of names.
    5. A space, if all cells consist of whole numbers separated by spaces.
    6. ``/`` or a space, if it separates labels according to `_parts_are_labels`.
    7. A comma that is not part of names, or ``|``, ``;`` or tab, if any cell contains it.
    8. An empty string.
    """

    def __init__(self) -> None:
        self._votes = dict.fromkeys((*_STRONG, ","), 0)
        self._n_plain = 0
        self._n_lists = 0
        self._any_list_cell = False
        self._all_numbers = True
        self._any_space = False
        self._key: str | None = None
        self._patterns = dict(_PATTERNS)
        self._cells: Counter[str] = Counter()  # of the first plain cells

    def add(self, cells: Sequence[object], row_error: RowError) -> None:
        """Count the separators in cells.

        Raise an error if the first cell in brackets is not a list.
        """
        for row, cell in enumerate(cells):
            if not isinstance(cell, str):
                if isinstance(cell, list | tuple) and len(cell) > 0:
                    self._count_list(cell)
            elif _looks_like_list(cell):
                is_empty = not cell.strip()[1:-1].strip()
                if self._any_list_cell and (self._n_lists or is_empty):
                    self._n_lists += not is_empty
                    continue
                items = _parse_list(cell)
                if items is None:
                    raise _not_a_list(row, cell, row_error)
                self._any_list_cell = True
                if items:
                    self._count_list(items)
            elif cell.strip():
                self._n_plain += 1
                for mark in self._votes:
                    self._votes[mark] += mark in cell
                numbers = self._all_numbers and all(map(_WHOLE.fullmatch, cell.split()))
                self._all_numbers = numbers
                self._any_space = self._any_space or " " in cell.strip()
                for mark, pattern in tuple(self._patterns.items()):
                    if not pattern.fullmatch(cell.strip()):
                        del self._patterns[mark]
                if self._n_plain <= _SAMPLED_CELLS:
                    self._cells[" ".join(cell.split())] += 1

    def _count_list(self, items: Sequence[object]) -> None:
        self._n_lists += 1
        if self._n_lists == 1 and isinstance(first := items[0], dict):
            self._key = next((key for key in _OBJECT_KEYS if key in first), None)

    def winner(self) -> CellFormat:
        """Return the chosen format."""
        any_list = self._any_list_cell or self._n_lists > 0
        return CellFormat(self._separator(), key=self._key, any_list=any_list)

    def _separator(self) -> str:
        if self._n_plain <= self._n_lists:
            return ""
        if self._patterns:
            return next(iter(self._patterns))
        best = max(_STRONG, key=lambda mark: self._votes[mark])
        enough = max(1, _STRONG_SHARE * self._n_plain)
        if self._votes[best] >= enough:
            return best
        splits_comma = self._votes[","] > 0 and not _commas_are_in_names(self._cells)
        if splits_comma and self._votes[","] >= enough:
            return ","
        if self._all_numbers and self._any_space:
            return " "
        for mark in (" / ", " "):
            if _parts_are_labels(self._cells, mark):
                return mark
        return "," if splits_comma else best if self._votes[best] else ""


def _commas_are_in_names(cells: Counter[str]) -> bool:
    """Return True if commas belong to names ("Portland, Oregon"), False if they separate labels.

    A label often occurs alone, or first in some cells and last in others. A part of a name rarely
    does. In addition, most cells with commas must repeat, unless few cells contain commas.
    """
    joined = {cell: cell.split(", ") for cell in cells if ", " in cell}
    parts = [part for split in joined.values() for part in split]
    if 2 * len(joined) < sum("," in cell for cell in cells) or len(parts) > 3 * len(joined):
        return False
    n_joined = sum(cells[cell] for cell in joined)
    is_rare = n_joined < _STRONG_SHARE * cells.total()
    if not (_repeat(joined, cells) or is_rare) or 2 * len(set(parts)) <= len(joined):
        return False
    first = {split[0] for split in joined.values()}
    last = {split[-1] for split in joined.values()}
    n_free_first = sum(split[0] in cells or split[0] in last for split in joined.values())
    n_free_last = sum(split[-1] in cells or split[-1] in first for split in joined.values())
    return min(n_free_first, n_free_last) < len(joined) / 4


def _parts_are_labels(cells: Counter[str], mark: str) -> bool:
    """Return True if ``mark`` separates labels in the cells, and not the words of one name.

    The words of a name ("New York City") rarely occur alone, and the whole cell occurs often.
    Labels (``python pandas``) also occur alone or in another order. In addition, most combinations
    of labels must be rare, or a few labels must form many combinations.
    """
    joined = {cell: cell.split(mark) for cell in cells if mark in cell}
    n_joined = sum(cells[cell] for cell in joined)
    if len(joined) < _MIN_JOINED or n_joined < _STRONG_SHARE * cells.total():
        return False
    parts = Counter(part for split in joined.values() for part in set(split))
    n_parts = parts.total()
    few_parts = 2 * len(parts) <= len(joined)
    alone = sum(count for part, count in parts.items() if part in cells) >= n_parts / 2
    parts_repeat = sum(count for count in parts.values() if count > 1) >= n_parts / 2
    rare_cells = parts_repeat and not _repeat(joined, cells)
    if mark == " ":
        return (alone or _in_any_order(joined.values())) and (few_parts or rare_cells)
    return few_parts or ((alone or _in_any_order(joined.values())) and rare_cells)


def _repeat(joined: Iterable[str], cells: Counter[str]) -> bool:
    """Return True if most cells of ``joined`` occur more than once."""
    counts = [cells[cell] for cell in joined]
    return sum(count for count in counts if count > 1) > sum(counts) / 2


def _in_any_order(lists: Collection[list[str]]) -> bool:
    """Return True if the lists look like labels, because they are sorted or have no fixed order.

    The words of names have a fixed order, but words like "of" and marks like "&" occur in any
    place. If too many lists repeat a word or contain a mark, return False.
    """
    n_repeats = sum(len(set(split)) < len(split) for split in lists)
    n_marks = sum(not any(map(str.isalnum, part)) for split in lists for part in split)
    if n_repeats + n_marks > 0.02 * len(lists):
        return False
    n_sorted = sum(split == sorted(split) for split in lists)
    if len(lists) >= _MIN_SORTED and n_sorted >= 0.95 * len(lists):
        return True
    pairs = Counter(pair for split in lists for pair in pairwise(split))
    n_reversed = sum(count for (a, b), count in pairs.items() if (b, a) in pairs)
    return n_reversed >= 0.1 * pairs.total()


def split_cells(
    cells: Sequence[object], form: CellFormat, row_error: RowError, *, keep_empty: bool = False
) -> LabelLists:
    """Return the number of labels in every cell, and the labels of all cells.

    Args:
        cells: Lists, strings, whole numbers, or None for no label.
        form: The format of the labels.
        row_error: Function that returns the error for a row number and a problem.
        keep_empty: Whether to keep an empty string in a list as a label.
    """
    counts = np.zeros(len(cells), dtype=np.int64)
    values: list[str] = []
    for row, cell in enumerate(cells):
        before = len(values)
        if isinstance(cell, str) and not (form.lists and _looks_like_list(cell)):
            if form.separator == "><":
                cell = cell.strip().removeprefix("<").removesuffix(">")
            parts = cell.split(form.separator) if form.separator else [cell]
            if form.separator == " ":
                parts = list(map(strip_uri, parts))
            values += [stripped for part in parts if (stripped := part.strip())]
        else:
            items: Any = cell
            if isinstance(cell, str):
                items = _parse_list(cell)
                if items is None:
                    raise _not_a_list(row, cell, row_error)
            elif not isinstance(cell, list | tuple):
                items = [] if is_missing(cell) else [cell]
            names = [_label_name(item, row, row_error, form.key) for item in items]
            values += names if keep_empty else filter(None, names)
        counts[row] = len(values) - before
    return counts, values


def strip_uri(label: str) -> str:
    """Remove the angle brackets around a URI. Return any other label unchanged."""
    return label[1:-1] if label[:1] == "<" and is_uri_list(label) else label


def is_uri_list(cell: str) -> bool:
    """Return True if a cell holds URIs separated by white space: ``<http://a> <http://b>``."""
    return _PATTERNS[" "].fullmatch(cell.strip()) is not None


def is_missing(cell: object) -> bool:
    """Return True for None and for NaN, which pandas writes for an empty cell."""
    return cell is None or (isinstance(cell, float) and cell != cell)


def _looks_like_list(cell: str) -> bool:
    text = cell.strip()
    if _BRACKETS.get(text[:1]) != text[-1:]:
        return False
    # a name may start and end with different pairs of parentheses: (R)-carvone (natural)
    return text[0] != "(" or not _TWO_PAIRS.fullmatch(text) or _parse_list(text) is not None


def _not_a_list(row: int, cell: str, row_error: RowError) -> DataError:
    remedy = "write a JSON list, or pass separator="
    return row_error(row, f"{cell[:60]!r} looks like a list of labels but is not one; {remedy}")


def _parse_list(cell: str) -> list[Any] | None:
    """Parse a cell as a JSON list or a Python list, tuple or set. Return None on failure."""
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
    if _NO_COMMA.search(text):  # NumPy writes no commas, and Python would join the strings
        return None
    if text[0] == "{":  # parsed as a list, a set keeps its order, and a dict fails
        text = f"[{text[1:-1]}]"
    try:
        value = ast.literal_eval(text)  # pandas writes a column of lists this way
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, list | tuple) else None


def _label_name(item: object, row: int, row_error: RowError, key: str | None) -> str:
    if isinstance(item, dict):
        keys = _OBJECT_KEYS if key is None else (key,)
        name = next((item[key] for key in keys if key in item), None)
        if name is None or isinstance(name, dict):
            problem = f"{item!r:.60} is not a label; an object needs a {keys[0]!r}"
            raise row_error(row, problem)
        return _label_name(name, row, row_error, None)
    if isinstance(item, str):
        return item
    if isinstance(item, int) and not isinstance(item, bool):
        return str(item)
    if isinstance(item, float) and item.is_integer():
        return str(int(item))
    raise row_error(row, f"{item!r:.60} is not a label; labels are names or whole numbers")


def order_names(names: Sequence[str]) -> list[str]:
    """Sort distinct names as numbers if all are whole numbers, else as text."""
    if all(_WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


class NamedLabels:
    """Codes of label values, in order of appearance. `finish` maps the codes to label ids."""

    def __init__(self, names: list[str] | None) -> None:
        """Store the names of all labels in the order of their ids, or None if they are unknown."""
        self._names = names
        self._codes: dict[str, int] = defaultdict(count().__next__)
        self._first_lines: list[tuple[Path, int]] = []  # where each code first occurs, for errors

    def add(self, lists: LabelLists, _: object, rows: Rows) -> NDArray[np.int64]:
        """Return the code of each label value. New values get the next free codes."""
        n_before, (counts, values) = len(self._codes), lists
        codes = np.fromiter(map(self._codes.__getitem__, values), np.int64, len(values))
        if self._names is not None and len(self._codes) > n_before:
            new_codes, entries = np.unique(codes, return_index=True)
            for entry in entries[new_codes >= n_before].tolist():
                self._first_lines.append((rows.path, rows.lines[row_of(counts, entry)]))
        return codes

    def finish(self, n_uses: int) -> tuple[NDArray[np.int64], list[str]]:
        """Return the id of each code, and the names in the order of their ids."""
        del n_uses
        distinct, names = list(self._codes), self._names or order_names(list(self._codes))
        are_ids = self._names is not None and all(map(_WHOLE.fullmatch, distinct))
        id_of, times = {name: label for label, name in enumerate(names)}, Counter(names)
        if are_ids:
            id_of, times = {value: int(value) for value in distinct}, Counter()
        for code, value in enumerate(distinct):
            problem = ""
            if value not in id_of:
                hint = did_you_mean(value, names) or "; add it"
                problem = f"label {value[:60]!r} is not in the file of label names{hint}"
            elif id_of[value] >= len(names):
                problem = f"label id {value} is out of range; ids go from 0 to {len(names) - 1}"
            elif times[value] > 1:
                problem = f"label {value[:60]!r} occurs {times[value]} times in the label names"
                problem += "; use row numbers instead of names"
            if problem:
                path, line = self._first_lines[code]
                raise data_error(path, problem, line)
        return np.fromiter(map(id_of.__getitem__, distinct), np.int64, len(distinct)), names


class NumberedLabels:
    """Label ids that are read from one column, with names from another."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._largest: tuple[int, Path, int] | None = None  # id, file and line

    def add(self, lists: LabelLists, id_lists: LabelLists | None, rows: Rows) -> NDArray[np.int64]:
        """Return the label ids, and record the name of each id."""
        assert id_lists is not None
        counts, values = lists
        id_counts, id_values = id_lists
        _check_lengths(counts, id_counts, "label ids", rows.error)
        wrong = next((i for i, v in enumerate(id_values) if not _ID.fullmatch(v)), None)
        if wrong is not None:
            problem = f"label id {id_values[wrong][:60]!r} is not a whole number below 10^8"
            raise rows.error(row_of(counts, wrong), f"{problem}; number the labels from 0")
        ids = np.array(list(map(int, id_values)), dtype=np.int64)
        if len(ids) and (self._largest is None or ids.max() > self._largest[0]):
            row = row_of(counts, int(ids.argmax()))
            self._largest = (int(ids.max()), rows.path, rows.lines[row])
        names = self._names
        for entry, (label, name) in enumerate(zip(ids.tolist(), values, strict=True)):
            if names.setdefault(label, name) != name:
                problem = f"label id {label} has two names, {names[label][:40]!r} and {name[:40]!r}"
                raise rows.error(row_of(counts, entry), f"{problem}; give each id one name")
        return ids

    def finish(self, n_uses: int) -> tuple[None, list[str]]:
        """Return None, because codes are already label ids, and the names of all labels.

        A label without a name is named by its id.
        """
        if self._largest is None:
            return None, []
        largest, path, line = self._largest
        if too_many_labels(largest + 1, n_uses):
            problem = f"label id {largest} is implausibly large; number the labels from 0"
            raise data_error(path, problem, line)
        return None, [self._names.get(label, str(label)) for label in range(largest + 1)]


def parse_weights(
    cells: Sequence[object], counts: NDArray[np.int64], row_error: RowError
) -> NDArray[np.float32]:
    """Parse the relevance of every label. Each list must be as long as the row's label list."""
    values: list[float] = []
    lengths = np.zeros(len(cells), dtype=np.int64)
    for row, cell in enumerate(cells):
        items = _parse_list(cell) if isinstance(cell, str) and cell.strip() else cell
        try:
            numbers = [float(item) for item in items or []]  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            problem = f"{cell!r:.60} is not a list of relevance values; write a list of numbers"
            raise row_error(row, problem) from None
        if not all(0 <= number < float("inf") for number in numbers):
            problem = f"{cell!r:.60}: relevance must be finite and not negative; correct the value"
            raise row_error(row, problem)
        values += numbers
        lengths[row] = len(numbers)
    _check_lengths(counts, lengths, "relevance values", row_error)
    return np.array(values, dtype=np.float32)


def _check_lengths(
    counts: NDArray[np.int64], lengths: NDArray[np.int64], what: str, row_error: RowError
) -> None:
    """Raise an error for the first row with different numbers of labels and of ``what``."""
    wrong = np.flatnonzero(counts != lengths)
    if len(wrong):
        row = int(wrong[0])
        raise row_error(row, f"{counts[row]} labels but {lengths[row]} {what}; give one per label")
