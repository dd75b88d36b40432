"""Read a table of labels: ids or URIs, names, synonyms, descriptions and broader labels.

SKOS vocabularies are read with rdflib.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from xml.parsers import expat

from elias.data.readers import base
from elias.data.readers.files import (
    data_error,
    head_lines,
    iter_lines,
    open_bytes,
    sanitize,
    short_repr,
    suffix_of,
)
from elias.data.readers.label_cells import (
    CellFormat,
    is_missing,
    is_uri_list,
    split_cells,
    strip_uri,
)
from elias.data.readers.table import Rows, TableFile
from elias.errors import quoted
from elias.labels import LabelRow, LabelTable
from elias.progress import progress

logger = logging.getLogger(__name__)

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
_LANGUAGE = "label_"  # prefix of the columns of names in one language, such as label_en
SKOS_FORMATS = {
    **{".ttl": "turtle", ".n3": "n3", ".nt": "nt", ".jsonld": "json-ld"},
    **{".rdf": "xml", ".xml": "xml", ".owl": "xml", ".skos": "xml"},
}
"""The format of a vocabulary, as rdflib calls it, for each suffix of a file name."""
_MAX_XML_TEXT = 20_000
_PARSE_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#parseType"


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
    table = TableFile(path, kind, base.ReadOptions(header=True, encoding=encoding))
    columns = label_columns(path, table.names, language)
    is_multilingual = columns["name"].startswith(_LANGUAGE)
    others = [name for name in table.names if is_multilingual and name.startswith(_LANGUAGE)]
    rows: list[LabelRow] = []
    line_of: dict[str, int] = {}
    n_missing = 0
    for chunk in table.chunks("", [*columns.values(), *others], ()):
        names, descriptions = (_cells(chunk, columns.get(p)) for p in ("name", "description"))
        synonyms, broader = (_split_list(chunk, columns.get(p)) for p in ("synonyms", "broader"))
        ids = list(map(strip_uri, _cells(chunk, columns.get("id"))))
        other_names = [_cells(chunk, column) for column in others]
        for row, (name, key) in enumerate(zip(names, ids, strict=True)):
            if not name and others:
                name = next((column[row] for column in other_names if column[row]), "")
                if not name:
                    continue  # Annif: a concept that is no longer used
                n_missing += 1
            if not name:
                raise chunk.error(row, "the label has no name; fill the cell, or remove the row")
            if key and key in line_of:
                problem = f"id {short_repr(key)} is also in row {line_of[key]}; keep one of them"
                raise chunk.error(row, problem)
            line_of[key] = chunk.lines[row]
            rows.append((name, key, synonyms[row], descriptions[row], broader[row]))
    _warn_of_missing_names(path, n_missing, len(rows), language)
    if not rows:
        raise data_error(path, "no label has a name; fill in the column of names")
    return LabelTable.from_rows(rows)


def _warn_of_missing_names(path: Path, missing: int, total: int, language: str | None) -> None:
    """Warn if labels have no name in the chosen language."""
    where, instead = "", "the URI"
    if language is not None:
        where, instead = f" in {language!r}", "a name in another language, or the URI,"
    if missing:
        logger.warning(
            "%s: %d of %d labels have no name%s; %s is used", path, missing, total, where, instead
        )


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


def label_columns(path: Path, names: Sequence[str], language: str | None = None) -> dict[str, str]:
    """Find the columns for name, id, synonyms, description and broader by their common names.

    A table with only an id column is accepted: the ids are then also the names. If there are
    columns of names in several languages (``label_en``), the one in ``language`` is chosen.
    """
    plain = {_plain(name): name for name in reversed(names)}
    columns = {
        part: plain[known[0]]
        for part, common in COLUMNS.items()
        if (known := [name for name in common if name in plain])
    }
    by_language = {
        name.removeprefix(_LANGUAGE): name for name in names if name.startswith(_LANGUAGE)
    }
    if "name" not in columns and by_language:
        columns["name"] = by_language[choose_language(path, language, by_language)]
    if "name" not in columns and len(names) == 1:
        return {"name": names[0]}
    if "name" not in columns and "id" in columns:
        columns["name"] = columns.pop("id")
    if "name" not in columns:
        problem = f"no column of label names among {', '.join(map(repr, names))}"
        raise data_error(path, f"{problem}; rename the column that contains the names to 'name'")
    return columns


def choose_language(path: Path, language: str | None, known: Iterable[str]) -> str:
    """Return the language to read: the given one, or the only one in the file."""
    languages = sorted(known)
    if language in languages:
        return language
    listed = ", ".join(languages)
    if language is not None:
        raise data_error(path, f"has no labels in the language {language!r}; use one of: {listed}")
    if len(languages) > 1:
        raise data_error(path, f"has labels in {listed}; choose one with language=")
    return languages[0]


def _plain(name: str) -> str:
    return name.strip().lower().translate(str.maketrans("", "", " _-"))


def _cells(rows: Rows, column: str | None) -> list[str]:
    """Return the stripped cells of a column, or empty strings if there is no such column."""
    cells = [""] * len(rows) if column is None else rows.texts((column,))
    return [cell.strip() for cell in sanitize(cells)[0]]


def _split_list(rows: Rows, column: str | None) -> Sequence[tuple[str, ...]]:
    """Return the names in each cell of a column. Strings are split at ``|``, ``;`` or tabs."""
    if column is None:
        return [()] * len(rows)
    cells: list[Any] = [None if is_missing(cell) else cell for cell in rows.columns[column]]
    texts = [cell for cell in cells if isinstance(cell, str)]
    separator = next((mark for mark in _SEPARATORS if any(mark in text for text in texts)), "")
    counts, values = split_cells(cells, CellFormat(separator), rows.error)
    names = iter(sanitize(values)[0])
    return [tuple(islice(names, count)) for count in counts]


def read_skos(path: Path, language: str | None = None) -> LabelTable:
    """Read the concepts of a SKOS vocabulary, sorted by URI.

    A concept has a URI, its preferred label in a language, its alternative and hidden labels in
    that language, its definition or scope note, and the URIs of its broader concepts. Deprecated
    concepts are left out. A concept without a label in the language is named by a label in another
    language. A concept without any label is named by its URI.

    Args:
        path: The file, gzipped or not. Its suffix gives the format (`SKOS_FORMATS`).
        language: The language of the labels. It may be None if all labels have the same language.

    Raises:
        DataError: If rdflib is not installed, the file is not valid, it has no concepts, or
            ``language`` is missing or unknown.
    """
    try:
        from rdflib import OWL, RDF, RDFS, SKOS, Graph, Literal
    except ImportError:
        remedy = "install elias-xmc[skos], or save the labels as CSV"
        raise data_error(path, f"SKOS vocabularies need rdflib; {remedy}") from None
    with progress(f"Reading {path.name}"), open_bytes(path) as stream:
        content, form = stream.read(), SKOS_FORMATS[suffix_of(path)]
        if form == "json-ld":
            _check_contexts(path, content)
        elif form == "xml":
            _check_xml(path, content)
        try:
            with warnings.catch_warnings(action="ignore"), _without_tracebacks():
                graph = Graph().parse(io.BytesIO(content), format=form)
        except Exception as error:  # rdflib raises errors of many types
            raise data_error(path, f"is not valid {form} ({quoted(error)}); correct it") from None

    deprecated = Literal(True)
    subjects = set(graph.subjects(RDF.type, SKOS.Concept))
    current = (s for s in subjects if (s, OWL.deprecated, deprecated) not in graph)
    concepts = sorted(current, key=str)
    if not concepts:
        raise data_error(path, "has no skos:Concept; give a SKOS vocabulary")

    def texts(concept: Any, *properties: Any) -> dict[str, list[str]]:
        """Return the values of a concept's properties by language, sorted for each property."""
        by_language: dict[str, list[str]] = defaultdict(list)
        for values in (sorted(graph.objects(concept, name), key=str) for name in properties):
            for value in values:
                key = getattr(value, "language", None) or ""
                by_language[key].append(" ".join(str(value).split()))
        return by_language

    names = [texts(concept, SKOS.prefLabel, RDFS.label) for concept in concepts]
    languages = {name for by_language in names for name in by_language if name}
    # labels without a language fit any
    language = choose_language(path, language, languages) if languages else None
    wanted = (language or "", "")
    n_missing = sum(not _first(by_language, *wanted) for by_language in names)
    _warn_of_missing_names(path, n_missing, len(concepts), language)

    def rows() -> Iterator[LabelRow]:
        for concept, by_language in zip(concepts, names, strict=True):
            listed = _first(by_language, *wanted, *sorted(by_language))
            notes = _first(texts(concept, SKOS.definition, SKOS.scopeNote), *wanted)
            others = texts(concept, SKOS.altLabel, SKOS.hiddenLabel)
            broader = {*graph.objects(concept, SKOS.broader)}
            broader |= {*graph.subjects(SKOS.narrower, concept)}
            name = listed[0] if listed else str(concept)
            synonyms = [x for x in dict.fromkeys(_first(others, *wanted)) if x != name]
            (name, note, *synonyms), _ = sanitize([name, " ".join(notes), *synonyms])
            yield name, str(concept), tuple(synonyms), note, tuple(sorted(map(str, broader)))

    return LabelTable.from_rows(rows())


def _first(by_language: dict[str, list[str]], *languages: str) -> list[str]:
    """Return the texts in the first of the languages that has any."""
    return next((by_language[name] for name in languages if by_language.get(name)), [])


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Prevent rdflib from logging a traceback for each invalid number or date."""
    log = logging.getLogger("rdflib.term")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _check_contexts(path: Path, content: bytes) -> None:
    """Raise `DataError` if rdflib would load a JSON-LD context from the network or the disk."""
    try:
        waiting: list[Any] = [json.loads(content)]
    except (ValueError, RecursionError) as error:
        raise data_error(path, f"is not valid JSON ({quoted(error)}); correct it") from None
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            contexts = [node.get("@context"), node.get("@import")]
            while contexts:
                context = contexts.pop()
                if isinstance(context, str):
                    problem = "refers to a @context at another address"
                    raise data_error(path, f"{problem}; save it with the context included")
                if isinstance(context, list):  # a list of contexts, which may be nested
                    contexts.extend(context)
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _check_xml(path: Path, content: bytes) -> None:
    """Raise `DataError` if a text in RDF/XML is very long, for example because of nested entities.

    The time that rdflib needs is quadratic in the length of a text.
    """
    counts = [0]  # length of the text in each open element; an XML literal counts as one text
    n_within = 0  # number of open elements within an XML literal

    def add_text(text: str) -> None:
        counts[-1] += len(text)
        if counts[-1] > _MAX_XML_TEXT:
            problem = f"a text has more than {_MAX_XML_TEXT:,} characters; shorten it"
            raise data_error(path, problem, parser.CurrentLineNumber)

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal n_within
        if n_within:
            n_within += 1
            add_text(name)
        else:
            counts.append(0)
            n_within = attributes.get(_PARSE_TYPE, "Resource") not in ("Resource", "Collection")

    def end(_: str) -> None:
        nonlocal n_within
        n_within = max(0, n_within - 1)
        if not n_within:
            counts.pop()

    parser = expat.ParserCreate(namespace_separator="")
    parser.buffer_text = True
    parser.CharacterDataHandler = add_text
    parser.StartElementHandler, parser.EndElementHandler = start, end
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise data_error(path, f"is not valid xml ({quoted(error)}); correct it") from None
