"""Reading a corpus of tables to disk a few rows at a time.

The rules are those of `tabular`, whose functions do the work chunk by chunk. In memory stay the
distinct names of labels and one number for each point. The labels column is read twice, since what
separates labels is decided over all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elias.data.formats import labels as label_cells
from elias.data.formats.chunks import few
from elias.data.formats.layout import SHORT, find_names, too_many_labels
from elias.data.formats.sources import bad, mend, read_names
from elias.data.formats.tables import Table, iter_rows
from elias.data.formats.tabular import (
    Rows,
    check_columns,
    labels_note,
    picked_columns,
    text_note,
)
from elias.data.storing import SplitWriter, write_description
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.data.formats.columns import Picked
    from elias.data.formats.options import ReadOptions
    from elias.data.formats.recognise import Files
    from elias.errors import DataError


class _Place(NamedTuple):
    path: Path
    line: int


def store_tables(files: Files, options: ReadOptions, folder: Path) -> None:
    """Write the corpus of some tables into an empty folder."""
    picked = picked_columns(files.by_split, files.kind, options)
    pairs = [(split, path) for split, paths in files.by_split.items() for path in paths]
    for _, path in pairs:
        check_columns(path, files.kind, picked)
    reader = _LabelReader(pairs, files, picked, options)
    writers: dict[str, SplitWriter] = {}
    try:
        with progress("Reading rows to disk") as advance:
            for rows in _chunks(pairs, files.kind, picked.all, picked.text):
                labels = reader.read(rows)
                _hand_out(rows, picked, labels, writers, folder)
                advance(len(labels.counts))
    finally:
        for writer in writers.values():
            writer.close()
    if "train" not in writers:
        there = ", ".join(writers)
        raise bad(files.source, f"no training rows, only: {there}; name some rows train")
    new_ids, names = reader.numbering.finish(sum(w.n_entries for w in writers.values()))
    notes = {"text": text_note(picked), "labels": labels_note(picked, reader.separator)}
    has_splits = "" not in files.by_split or picked.split is not None
    about = {"format": files.kind, "notes": notes, "has_splits": has_splits}
    finish(folder, about, writers, new_ids, names)


class _Labels(NamedTuple):
    """The labels of some rows."""

    counts: NDArray[np.int64]
    codes: NDArray[np.int64]
    weights: NDArray[np.float32] | None


class _LabelReader:
    """Turns the label cells of some rows into codes, by rules that hold for all rows."""

    def __init__(
        self, pairs: list[tuple[str, Path]], files: Files, picked: Picked, options: ReadOptions
    ) -> None:
        given = options.separator
        self._picked = picked
        self._lists = given is None
        self.separator = _separator(pairs, files.kind, picked.labels) if given is None else given
        self._id_separator = ""
        if picked.ids is not None:
            self._id_separator = _separator(pairs, files.kind, picked.ids)
        self.numbering = _numbering(picked, files.source)

    def read(self, rows: Rows) -> _Labels:
        """Return the labels of some rows."""
        picked = self._picked
        lists = label_cells.split_cells(
            rows.column(picked.labels),
            self.separator,
            rows.error,
            lists=self._lists,
            keep_empty=picked.ids is not None,
        )
        id_lists = weights = None
        if picked.ids is not None:
            column = rows.column(picked.ids)
            id_lists = label_cells.split_cells(column, self._id_separator, rows.error)
        codes = self.numbering.add(lists, id_lists, rows)
        if picked.weights is not None:
            cells = rows.column(picked.weights)
            weights = label_cells.parse_weights(cells, lists.counts, rows.error)
        return _Labels(lists.counts, codes, weights)


def finish(
    folder: Path,
    about: dict[str, Any],
    writers: dict[str, SplitWriter],
    new_ids: NDArray[np.int64] | None,
    names: list[str],
    features: Mapping[str, dict[str, int]] | None = None,
) -> None:
    """Put the labels of all splits into order, and write what the corpus is.

    ``features`` are the sizes of those that were written beside splits.
    """
    mended_names, n_mended = mend(names)
    order = [name for name in SHORT if name in writers]
    splits = {name: writers[name].finish(new_ids, len(names)) for name in order}
    for name, sizes in (features or {}).items():
        splits[name]["features"] = sizes
    n_mended += sum(writer.n_mended for writer in writers.values())
    if n_mended:
        about["notes"]["mended"] = f"NULs or lone surrogates replaced in {n_mended} texts or names"
    write_description(folder, {**about, "splits": splits}, mended_names)


def _hand_out(
    rows: Rows,
    picked: Picked,
    labels: _Labels,
    writers: dict[str, SplitWriter],
    folder: Path,
) -> None:
    """Give each row to the writer of its split."""
    counts, codes, weights = labels
    texts = rows.texts(picked.text)
    split_of = rows.split_names(picked.split)
    for name in dict.fromkeys(split_of.tolist()):
        if name not in writers:
            writers[name] = SplitWriter(folder / name)
        own = split_of == name
        if own.all():
            writers[name].add(texts, counts, codes, weights)
            continue
        entries = np.repeat(own, counts)
        writers[name].add(
            [texts[row] for row in np.flatnonzero(own)],
            counts[own],
            codes[entries],
            None if weights is None else weights[entries],
        )


def _separator(pairs: list[tuple[str, Path]], kind: str, column: str) -> str:
    """Return what separates labels in a column, by all of its cells."""
    votes = label_cells.SeparatorVotes()
    with progress("Looking at labels") as advance:
        for rows in _chunks(pairs, kind, [column], ()):
            votes.add(rows.column(column), rows.error)
            advance(len(rows.tables[0]))
    return votes.winner()


def _chunks(
    pairs: list[tuple[str, Path]], kind: str, wanted: Sequence[str], required: Sequence[str]
) -> Iterator[Rows]:
    for split, path in pairs:
        rows = iter_rows(path, kind, wanted, required)
        for chunk in few(rows, row_size):
            columns = {name: [cells[i] for _, cells in chunk] for i, name in enumerate(wanted)}
            yield Rows([Table(path, columns, [line for line, _ in chunk])], [split])


def row_size(row: tuple[int, list[Any]]) -> int:
    """Return about how many characters a row of a table has."""
    return sum(len(cell) if isinstance(cell, str | list) else 1 for cell in row[1])


def _numbering(picked: Picked, source: Path) -> _Names | _Ids:
    if picked.ids is not None:
        return _Ids(source)
    names_file = find_names(source) if source.is_dir() else None
    return _Names(None if names_file is None else read_names(names_file))


class _Names:
    """Numbers label values in the order in which they come, and sorts them at the end."""

    def __init__(self, known: list[str] | None) -> None:
        self._known = known
        self._seen: dict[str, int] = {}
        self._places: list[_Place] = []

    def add(self, lists: label_cells.LabelLists, _: object, rows: Rows) -> NDArray[np.int64]:
        """Return the codes of some labels."""
        before, seen = len(self._seen), self._seen
        codes = np.fromiter(
            (seen.setdefault(value, len(seen)) for value in lists.values),
            np.int64,
            len(lists.values),
        )
        if self._known is not None and len(seen) > before:  # where they came first, for errors
            table = rows.tables[0]
            _, entries = np.unique(codes, return_index=True)
            first = {int(codes[entry]): int(entry) for entry in entries if codes[entry] >= before}
            self._places += [
                _Place(table.path, table.lines[lists.row_of(first[code])])
                for code in range(before, len(seen))
            ]
        return codes

    def finish(self, n_uses: int) -> tuple[NDArray[np.int64], list[str]]:
        """Return the id of each code, and the names in the order of their ids."""
        del n_uses
        if self._known is None:
            found = label_cells.number_distinct(list(self._seen))
            return found.ids, found.names

        def refuse(code: int, problem: str) -> DataError:
            return bad(self._places[code].path, problem, self._places[code].line)

        return label_cells.find_distinct(list(self._seen), self._known, refuse), self._known


class _Ids:
    """Takes ids from one column and their names from another."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._names: dict[int, str] = {}

    def add(
        self, lists: label_cells.LabelLists, id_lists: label_cells.LabelLists | None, rows: Rows
    ) -> NDArray[np.int64]:
        """Return the ids of some labels."""
        assert id_lists is not None
        ids = label_cells.checked_ids(lists, id_lists, rows.error)
        names = self._names
        for entry, (label, name) in enumerate(zip(ids.tolist(), lists.values, strict=True)):
            if names.setdefault(label, name) != name:
                row = lists.row_of(entry)
                raise rows.error(row, label_cells.two_names(label, names[label], name))
        return ids

    def finish(self, n_uses: int) -> tuple[None, list[str]]:
        """Return the names; ids are what they are."""
        n_labels = max(self._names, default=-1) + 1
        if too_many_labels(n_labels, n_uses):
            raise bad(
                self._source, f"label id {n_labels - 1} is too large to count labels by; from 0"
            )
        return None, [self._names.get(label, str(label)) for label in range(n_labels)]
