"""Read a corpus in chunks into memory-mapped files.

The rules are those of `tabular`, whose functions do the work chunk by chunk. In memory stay the
distinct names of labels and one number for each point. The labels column is read twice, since what
separates labels is decided over all of it.

The rules are those of the readers, whose functions do the work chunk by chunk. In memory stay the
names of labels and one number for each point; of npz files, one matrix at a time.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elias.data.readers import base, label_cells, lf, pecos, xmc
from elias.data.readers import npz as npz_folder
from elias.data.readers.base import chunked
from elias.data.readers.files import (
    SHORT,
    bad,
    find,
    find_names,
    iter_lines,
    numbered,
    read_filters,
    read_names,
    sanitize,
    the_only_file,
    too_many_labels,
)
from elias.data.readers.npz import read_npz, tidy_features
from elias.data.readers.table import (
    Table,
    TableRows,
    check_columns,
    iter_rows,
    labels_note,
    picked_columns,
    text_note,
)
from elias.data.readers.xmc import stream_labelled, stream_matrix
from elias.data.storage import (
    FEATURES,
    LABELS,
    MatrixWriter,
    SplitWriter,
    store_matrix,
    write_description,
)
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.data.readers.base import ReadOptions
    from elias.data.readers.columns import Picked
    from elias.data.readers.detect import Files
    from elias.data.readers.npz import Spelling
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

    def read(self, rows: TableRows) -> _Labels:
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
    mended_names, n_mended = sanitize(names)
    order = [name for name in SHORT if name in writers]
    splits = {name: writers[name].finish(new_ids, len(names)) for name in order}
    for name, sizes in (features or {}).items():
        splits[name]["features"] = sizes
    n_mended += sum(writer.n_mended for writer in writers.values())
    if n_mended:
        about["notes"]["mended"] = f"NULs or lone surrogates replaced in {n_mended} texts or names"
    write_description(folder, {**about, "splits": splits}, mended_names)


def _hand_out(
    rows: TableRows,
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
) -> Iterator[TableRows]:
    for split, path in pairs:
        rows = iter_rows(path, kind, wanted, required)
        for chunk in chunked(rows, row_size):
            columns = {name: [cells[i] for _, cells in chunk] for i, name in enumerate(wanted)}
            yield TableRows([Table(path, columns, [line for line, _ in chunk])], [split])


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

    def add(self, lists: label_cells.LabelLists, _: object, rows: TableRows) -> NDArray[np.int64]:
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
        self,
        lists: label_cells.LabelLists,
        id_lists: label_cells.LabelLists | None,
        rows: TableRows,
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


class _Spool:
    """The splits of a corpus on their way to a folder."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.writers: dict[str, SplitWriter] = {}
        self.about: dict[str, Any] = {"notes": {}}
        self._features: dict[str, dict[str, int]] = {}
        self._columns: dict[str, int] = {}

    @property
    def n_uses(self) -> int:
        """Return how many labels all points have."""
        return sum(writer.n_entries for writer in self.writers.values())

    @property
    def n_labels(self) -> int:
        """Return how many labels the training split is over."""
        return self._columns["train"]

    def split(self, name: str) -> SplitWriter:
        """Begin a split."""
        self.writers[name] = writer = SplitWriter(self.folder / name)
        return writer

    def labels(self, name: str, parts: Iterable[csr_matrix], texts: Path | None) -> None:
        """Write the labels of a split, and the lines of a file of texts beside them."""
        writer = self.split(name)
        lines = iter(()) if texts is None else map(_stripped, iter_lines(texts))
        n_texts = n_points = 0
        with progress(f"Reading the {name} points to disk") as advance:
            for rows in parts:
                self._columns[name] = rows.shape[1]
                n_points += rows.shape[0]
                if texts is None:
                    _add(writer, None, rows)
                else:
                    n_texts += _add_lines(writer, lines, rows)
                advance(rows.shape[0])
        n_texts += sum(1 for _ in lines)
        if texts is not None and n_texts != n_points:
            counts = f"holds {n_texts} texts for {n_points} points"
            raise bad(texts, f"{counts}; give one line for each")

    def labelled(self, name: str, path: Path, texts: Path | None) -> None:
        """Write the points of an ``N D L`` file."""
        features: list[MatrixWriter] = []

        def labels() -> Iterator[csr_matrix]:
            for part in stream_labelled(path):
                if not features:
                    target = self.folder / name
                    features.append(MatrixWriter(target, part.features.shape[1], FEATURES))
                features[0].append(part.features)
                yield part.labels

        try:
            self.labels(name, labels(), texts)
        finally:
            for writer in features:
                writer.close()
        self._features[name] = features[0].finish()

    def features(self, name: str, parts: Iterable[csr_matrix]) -> None:
        """Write the features of a split."""
        with progress(f"Reading the {name} features to disk") as advance:
            self._features[name] = store_matrix(_told(parts, advance), self.folder / name, FEATURES)

    def filters(self, folder: Path, name: str, n_labels: int) -> None:
        """Keep the pairs never to predict in a split, where there are any."""
        pairs = read_filters(folder, name, (len(self.writers[name]), n_labels))
        if pairs is not None:
            np.save(self.folder / name / "filters.npy", pairs)

    def label_features(self, parts: Iterable[csr_matrix]) -> None:
        """Write the features of the labels."""
        self.about["label_features"] = store_matrix(parts, self.folder / LABELS, FEATURES)

    def finish(self, names: list[str], format: str, *, has_splits: bool) -> None:
        """Put the labels into order, and write what the corpus is."""
        for name, count in self._columns.items():
            if count != len(names):
                counts = f"{count} labels, but there are {len(names)} label names"
                problem = f"the {name} split is over {counts}; the files must belong together"
                raise bad(self.source, problem)
        self.about |= {"format": format, "has_splits": has_splits}
        finish(self.folder, self.about, self.writers, None, names, self._features)

    def close(self) -> None:
        """Close the files."""
        for writer in self.writers.values():
            writer.close()


def _stripped(line: str) -> str:
    return line.rstrip("\n").removesuffix("\r")


def _add(writer: SplitWriter, texts: list[str] | None, rows: csr_matrix) -> None:
    counts = np.diff(rows.indptr).astype(np.int64)
    writer.add(texts, counts, rows.indices.astype(np.int64), rows.data)


def _add_lines(writer: SplitWriter, lines: Iterator[str], rows: csr_matrix) -> int:
    """Add rows with as many of the next lines as there are; return how many that are."""
    done = 0
    for texts in chunked(islice(lines, rows.shape[0]), len):
        _add(writer, texts, rows[done : done + len(texts)])
        done += len(texts)
    return done


def _told(parts: Iterable[csr_matrix], advance: Any) -> Iterator[csr_matrix]:
    for rows in parts:
        yield rows
        advance(rows.shape[0])


def _sliced(matrix: csr_matrix) -> Iterator[csr_matrix]:
    """Yield the rows of a matrix that is in memory, a chunked at a time."""
    step = base.CHUNK
    return (matrix[start : start + step] for start in range(0, matrix.shape[0], step))


def store_folder(source: Path, spelling: Spelling, folder: Path) -> None:
    """Write a corpus of text lines and npz matrices into an empty folder."""
    spool = _Spool(source, folder)
    try:
        for split in SHORT:
            labels = npz_folder.read_split_labels(source, split)
            if labels is None:
                continue
            texts = npz_folder.find_texts(source, spelling, split)
            features = npz_folder.find_features(source, spelling, split)
            if texts is None and features is None:
                raise npz_folder.neither(source, spelling, split)
            spool.labels(split, _sliced(labels), texts)
            spool.filters(source, split, labels.shape[1])
            if features is not None:
                spool.features(split, _sliced(tidy_features(read_npz(features), features)))
        own = source / "X.lbl.npz"
        if own.is_file():
            spool.label_features(_sliced(tidy_features(read_npz(own), own)))
        names, notes = npz_folder.label_names(source, spool.n_labels, spool.n_uses)
        spool.about["notes"] = notes
        spool.finish(names, spelling.name, has_splits=True)
    finally:
        spool.close()


def store_xmc(files: dict[str, list[Path]], options: ReadOptions, source: Path, out: Path) -> None:
    """Write the corpus of ``N D L`` files, one for each split or one for all, to a folder."""
    options.refuse(source, "XMC")
    spool = _Spool(source, out)
    try:
        if "" in files:
            spool.labelled("train", files[""][0], None)
            names = numbered(files[""][0], spool.n_labels, spool.n_uses)
            spool.finish(names, "xmc", has_splits=False)
            return
        for split in (name for name in SHORT if name in files):
            path = the_only_file(split, files[split])
            spool.labelled(split, path, xmc.find_texts(source, split))
        _finish_xmc(spool)
    finally:
        spool.close()


def store_xmc_folder(source: Path, options: ReadOptions, out: Path) -> None:
    """Write the corpus of a folder of ``trn_X_Y.txt`` files to a folder."""
    options.refuse(source, "XMC")
    spool = _Spool(source, out)
    try:
        for split in SHORT:
            path = find(source, xmc.LABEL_MATRIX.format(SHORT[split]))
            if path is not None:
                texts = xmc.find_texts(source, split)
                spool.labels(split, stream_matrix(path, "label"), texts)
                _store_features(spool, split)
        _finish_xmc(spool)
    finally:
        spool.close()


def _finish_xmc(spool: _Spool) -> None:
    for split in spool.writers:
        spool.filters(spool.source, split, spool.n_labels)
    _store_label_features(spool)
    names = xmc.label_names(spool.source, spool.n_labels, spool.n_uses)
    spool.finish(names, "xmc", has_splits=True)


def _store_features(spool: _Spool, split: str) -> None:
    path = find(spool.source, xmc.FEATURE_MATRIX.format(SHORT[split]))
    if path is not None:
        spool.features(split, stream_matrix(path, "feature"))


def _store_label_features(spool: _Spool) -> None:
    path = find(spool.source, xmc.FEATURE_MATRIX.format("lbl"))
    if path is not None:
        spool.label_features(stream_matrix(path, "feature"))


def store_lf(source: Path, options: ReadOptions, out: Path) -> None:
    """Write the corpus of a folder of LF files to a folder."""
    options.refuse(source, "LF", text=False)
    spool = _Spool(source, out)
    names = lf.known_names(source)
    highest = -1
    try:
        for split in SHORT:
            path = lf.points_file(source, split)
            if path is not None:
                n_labels = None if names is None else len(names)
                highest = max(highest, _store_points(path, options, n_labels, spool.split(split)))
                _store_features(spool, split)
        if names is None:
            names = numbered(source, highest + 1, spool.n_uses)
        for split in spool.writers:
            spool.filters(source, split, len(names))
        _store_label_features(spool)
        spool.finish(names, "lf", has_splits=True)
    finally:
        spool.close()


def _store_points(
    path: Path, options: ReadOptions, n_labels: int | None, writer: SplitWriter
) -> int:
    """Write the points of a file of JSON lines; return the highest label id."""
    wanted, required = lf.points_columns(path, options.text)
    highest = -1
    weighted = False
    bare: DataError | None = None
    with progress(f"Reading {path.name} to disk") as advance:
        rows = iter_rows(path, "jsonl", wanted, required)
        for chunk in chunked(rows, row_size):
            columns = {name: [cells[i] for _, cells in chunk] for i, name in enumerate(wanted)}
            table = Table(path, columns, [line for line, _ in chunk])
            points = lf.read_rows(table, n_labels, weighted=weighted)
            if points.weighted and bare is not None:
                raise bare
            weighted = points.weighted
            if not weighted and bare is None and len(points.ids):
                row = int(np.flatnonzero(points.counts)[0])
                count = points.counts[row]
                problem = f"{count} labels but 0 relevance values; give one for each"
                bare = table.error(row, problem)
            writer.add(points.texts, points.counts, points.ids, points.weights)
            highest = max(highest, int(points.ids.max(initial=-1)))
            advance(len(chunk))
    writer.weighted = weighted
    return highest


def store_pecos(
    files: dict[str, list[Path]], options: ReadOptions, source: Path, out: Path
) -> None:
    """Write the corpus of PECOS's text files, one for each split or one for all, to a folder."""
    options.refuse(source, "PECOS text")
    has_splits = "" not in files
    chosen = {split or "train": the_only_file(split, paths) for split, paths in files.items()}
    beside = chosen["train"].parent
    names_file = find_names(beside)
    names = None if names_file is None else read_names(names_file)
    spool = _Spool(source, out)
    highest = -1
    try:
        for split in (name for name in SHORT if name in chosen):
            n_labels = None if names is None else len(names)
            highest = max(highest, _store_lines(chosen[split], n_labels, spool.split(split)))
        if names is None:
            names = numbered(source, highest + 1, spool.n_uses)
            spool.about["notes"] = {"labels": "no file of names: named by number"}
        if has_splits:
            for split in spool.writers:
                spool.filters(beside, split, len(names))
        spool.finish(names, "pecos", has_splits=has_splits)
    finally:
        spool.close()


def _store_lines(path: Path, n_labels: int | None, writer: SplitWriter) -> int:
    """Write the points of a file of ``ids<tab>text`` lines; return the highest label id."""
    highest, done = -1, 0
    with progress(f"Reading {path.name} to disk") as advance:
        for lines in chunked(map(_stripped, iter_lines(path)), len):
            points = pecos.parse(path, lines, done)
            if n_labels is not None:
                pecos.check_range(path, points, n_labels, done)
            writer.add(*points)
            highest = max(highest, int(points.ids.max(initial=-1)))
            done += len(lines)
            advance(len(lines))
    return highest
