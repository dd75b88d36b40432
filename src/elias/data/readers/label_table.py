"""Read a table of labels: ids or URIs, names, synonyms, descriptions and broader labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elias.data.readers import base
from elias.data.readers.files import (
    data_error,
    head_lines,
    iter_lines,
    sanitize,
    short_repr,
)
from elias.data.readers.label_cells import (
    CellFormat,
    is_missing,
    is_uri_list,
    split_cells,
    strip_uri,
)
from elias.data.readers.table import Rows, column_names, row_chunks
from elias.labels import LabelTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


COLUMNS = {
    "name": (
        *("name", "label", "preflabel", "title", "term", "heading", "labelname"),
        *("preferredname", "preferredlabel", "subject", "category", "tag"),
    ),
    "id": ("id", "uri", "labelid", "code", "notation", "identifier", "uid", "iri", "url", "key"),
    "synonyms": (
        *("synonyms", "synonym", "altlabels", "altlabel", "aliases", "alias", "entryterms"),
        *("alternatives", "alternativenames", "othernames", "hiddenlabel"),
    ),
    "description": (
        *("description", "definition", "scopenote", "note", "content", "text", "gloss", "abstract"),
    ),
    "broader": ("broader", "broaderids", "parent", "parents", "parentid", "parentids"),
}
"""Common column names of each part of a label, without case, spaces, ``_`` and ``-``."""
FILES = tuple(f"labels.{suffix}" for suffix in ("csv", "tsv", "jsonl", "json", "parquet"))
"""Files of a corpus folder that are read as its label table."""
_SEPARATORS = ("|", ";", "\t")


def read_label_table(
    path: Path, kind: str, encoding: str | None = None, language: str | None = None
) -> LabelTable:
    """Read a label table, or a vocabulary of Annif.

    Args:
        path: The file.
        kind: ``lines`` for one name per line, or the format of a table (`table.KINDS`).
        encoding: The encoding of a text file, UTF-8 by default.
        language: The language of the names, if there are columns such as ``label_en``.

    Raises:
        DataError: If there is no column of names, a name is empty, or an id repeats.
    """
    if kind == "lines":
        names = [line.strip() for line in iter_lines(path, encoding)]
        return LabelTable(tuple(sanitize([name for name in names if name])[0]))
    if kind == "tsv" and is_uri_list(head_lines(path, encoding)[0].split("\t")[0]):
        return _read_annif_tsv(path, encoding)
    options = base.ReadOptions(header=True, encoding=encoding)
    all_names = column_names(path, kind, options)
    columns = choose_columns(path, all_names, language)
    rows: list[tuple[str, str, Sequence[str], str, Sequence[str]]] = []
    line_of: dict[str, int] = {}
    for chunk in row_chunks(path, "", kind, list(columns.values()), (), options):
        cells = {
            part: chunk.texts((columns[part],)) if part in columns else [""] * len(chunk)
            for part in ("name", "id", "description")
        }
        synonyms = _split_list(chunk, columns.get("synonyms"))
        broader = _split_list(chunk, columns.get("broader"))
        cells = {
            part: [cell.strip() for cell in sanitize(column)[0]] for part, column in cells.items()
        }
        cells["id"] = list(map(strip_uri, cells["id"]))
        for row, (name, key) in enumerate(zip(cells["name"], cells["id"], strict=True)):
            if not name:
                raise chunk.error(row, "the label has no name; fill the cell, or remove the row")
            if key and key in line_of:
                problem = f"id {short_repr(key)} is also in row {line_of[key]}; keep one of them"
                raise chunk.error(row, problem)
            line_of[key] = chunk.lines[row]
        columns_of_rows = (cells["name"], cells["id"], synonyms, cells["description"], broader)
        rows.extend(zip(*columns_of_rows, strict=True))
    return LabelTable.from_columns(*zip(*rows, strict=True))


def _read_annif_tsv(path: Path, encoding: str | None) -> LabelTable:
    """Read a vocabulary of Annif: lines of URI, label and optionally notation, without a header.

    A URI without a label is a concept that is no longer used.
    """
    names: dict[str, str] = {}
    for number, line in enumerate(iter_lines(path, encoding), start=1):
        cells = [cell.strip() for cell in line.split("\t")]
        uri = strip_uri(cells[0])
        if uri in names:
            raise data_error(path, f"URI {short_repr(uri)} occurs twice; keep one line", number)
        if uri and len(cells) > 1 and cells[1]:
            names[uri] = cells[1]
    return LabelTable(tuple(sanitize(list(names.values()))[0]), ids=tuple(names))


def choose_columns(path: Path, names: Sequence[str], language: str | None = None) -> dict[str, str]:
    """Return the column of each part of a label, found by common names.

    A table with only an id column is accepted: the ids are then also the names. If there are
    columns of names in several languages (``label_en``), that of ``language`` is taken.
    """
    plain = {_plain(name): name for name in reversed(names)}
    columns = {
        part: plain[known[0]]
        for part, common in COLUMNS.items()
        if (known := [name for name in common if name in plain])
    }
    by_language = {name[len("label_") :]: name for name in names if name.startswith("label_")}
    if "name" not in columns and by_language:
        columns["name"] = by_language[choose_language(path, language, by_language)]
    if "name" not in columns and len(names) == 1:
        return {"name": names[0]}
    if "name" not in columns and "id" in columns:
        columns["name"] = columns.pop("id")
    if "name" not in columns:
        problem = f"no column of label names among {', '.join(map(repr, names))}"
        raise data_error(
            path, f"{problem}; call it 'name', and the others id, synonyms, description"
        )
    return columns


def choose_language(path: Path, language: str | None, known: Iterable[str]) -> str:
    """Return the language to read: the given one, or the only one that there is."""
    languages = sorted(known)
    if language in languages:
        return language
    listed = ", ".join(languages)
    if language is not None:
        raise data_error(path, f"has no labels in language= {language!r}; it has: {listed}")
    if len(languages) > 1:
        raise data_error(path, f"has labels in {listed}; choose one with language=")
    return languages[0]


def _plain(name: str) -> str:
    return name.strip().lower().translate(str.maketrans("", "", " _-"))


def _split_list(rows: Rows, column: str | None) -> Iterable[Sequence[str]]:
    """Return the names in each row of a column: a list, or a string split at ``|``, ``;``, tabs."""
    if column is None:
        return [()] * len(rows)
    cells: list[Any] = [None if is_missing(cell) else cell for cell in rows.columns[column]]
    texts = [cell for cell in cells if isinstance(cell, str)]
    separator = next((mark for mark in _SEPARATORS if any(mark in text for text in texts)), "")
    lists = split_cells(cells, CellFormat(separator=separator, lists=True), rows.error)
    ends = lists.counts.cumsum()
    values = sanitize(lists.values)[0]
    return [tuple(values[end - count : end]) for end, count in zip(ends, lists.counts, strict=True)]
