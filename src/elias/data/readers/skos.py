"""Read SKOS vocabularies as label tables, with rdflib."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.data.readers.files import data_error, open_bytes, sanitize
from elias.data.readers.label_table import choose_language
from elias.errors import quoted
from elias.labels import LabelTable
from elias.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


logger = logging.getLogger(__name__)

FORMATS = {
    **{"ttl": "turtle", "n3": "n3", "nt": "nt", "jsonld": "json-ld"},
    **{"rdf": "xml", "xml": "xml", "owl": "xml", "skos": "xml"},
}
"""The format of a vocabulary, as rdflib calls it, for each suffix of a file name."""


def read_skos(path: Path, language: str | None = None) -> LabelTable:
    """Read the concepts of a SKOS vocabulary, sorted by URI.

    A concept has a URI, its preferred label in a language, its alternative and hidden labels in
    that language, its definition or scope note, and the URIs of its broader concepts. Deprecated
    concepts are left out. If a concept has no label in the language, another one is taken.

    Args:
        path: The file, gzipped or not. Its suffix gives the format (`FORMATS`).
        language: The language of the labels. It may be None if all labels have the same language.

    Raises:
        DataError: If rdflib is not installed, the file is not valid, it has no concepts, or the
            language has to be chosen.
    """
    try:
        from rdflib import OWL, RDF, RDFS, SKOS, Graph, Literal
    except ImportError:
        remedy = "install elias-xmc[skos], or save the labels as CSV"
        raise data_error(path, f"SKOS vocabularies need rdflib; {remedy}") from None
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower().removeprefix(".")
    with progress(f"Reading {path.name}"), open_bytes(path) as stream:
        content = stream.read()
        if FORMATS[suffix] == "json-ld":
            _check_contexts(path, content)
        try:
            with warnings.catch_warnings(action="ignore"):  # rdflib uses its own deprecated class
                graph = Graph().parse(io.BytesIO(content), format=FORMATS[suffix])
        except Exception as error:  # rdflib raises errors of many types
            problem = f"is not valid {FORMATS[suffix]} ({quoted(error)})"
            raise data_error(path, problem) from None

    deprecated = Literal(True)
    found = set(graph.subjects(RDF.type, SKOS.Concept))
    concepts = sorted((c for c in found if (c, OWL.deprecated, deprecated) not in graph), key=str)
    if not concepts:
        raise data_error(path, "has no skos:Concept; give a SKOS vocabulary")

    def texts(concept: Any, *properties: Any) -> dict[str, list[str]]:
        """Return the sorted values of properties by language, the first property first."""
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
    n_other = sum(language is not None and language not in by_language for by_language in names)
    if n_other:
        logger.warning(
            "%s: %d of %d concepts have no label in %r; another language, or the URI, is used",
            *(path, n_other, len(concepts), language),
        )

    def rows() -> Iterator[tuple[str, str, list[str], str, list[str]]]:
        wanted = (language or "", "")
        for concept, by_language in zip(concepts, names, strict=True):
            listed = _first(by_language, *wanted, *sorted(by_language))
            notes = _first(texts(concept, SKOS.definition, SKOS.scopeNote), *wanted)
            others = texts(concept, SKOS.altLabel, SKOS.hiddenLabel)
            broader = {*graph.objects(concept, SKOS.broader)}
            broader |= {*graph.subjects(SKOS.narrower, concept)}
            name = listed[0] if listed else str(concept)
            synonyms = [x for x in dict.fromkeys(_first(others, *wanted)) if x != name]
            yield name, str(concept), synonyms, " ".join(notes), sorted(map(str, broader))

    name_column, ids, synonyms, descriptions, broader = zip(*rows(), strict=True)
    return LabelTable.from_columns(
        sanitize(name_column)[0],
        ids,
        [sanitize(values)[0] for values in synonyms],
        sanitize(descriptions)[0],
        broader,
    )


def _first(by_language: dict[str, list[str]], *languages: str) -> list[str]:
    """Return the texts in the first of the languages that has any."""
    return next((by_language[name] for name in languages if by_language.get(name)), [])


def _check_contexts(path: Path, content: bytes) -> None:
    """Refuse a JSON-LD file that would make rdflib load a context from the network or the disk."""
    try:
        waiting: list[Any] = [json.loads(content)]
    except (ValueError, RecursionError) as error:
        raise data_error(path, f"is not valid JSON ({quoted(error)})") from None
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            contexts = node.get("@context")
            listed: Iterable[Any] = contexts if isinstance(contexts, list) else [contexts]
            if "@import" in node or any(isinstance(one, str) for one in listed):
                problem = "refers to a @context at another address"
                raise data_error(path, f"{problem}; save it with the context included")
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
