"""Vocabularies: SKOS in all its formats, and the TSV and CSV vocabularies of Annif."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from elias.data import load_corpus, load_label_table
from elias.errors import DataError

rdflib = pytest.importorskip("rdflib")

TURTLE = """
@prefix skos: <http://www.w3.org/2004/02/skos/core#> .
@prefix owl: <http://www.w3.org/2002/07/owl#> .
@prefix : <http://example.org/s/> .
:animals a skos:Concept ; skos:prefLabel "animals"@en, "eläimet"@fi ; skos:narrower :mice .
:fish a skos:Concept ; skos:prefLabel "fish"@en, "kalat"@fi ; skos:broader :animals ;
    skos:altLabel "fishes"@en, "pisces"@en ; skos:hiddenLabel "fisch"@en ;
    skos:definition "Animals\\n that swim."@en .
:mice a skos:Concept ; skos:prefLabel "mice"@en ; skos:scopeNote "Small rodents." .
:old a skos:Concept ; skos:prefLabel "old"@en ; owl:deprecated true .
"""
ROWS = [
    ("animals", "http://example.org/s/animals", (), "", ()),
    (
        "fish",
        "http://example.org/s/fish",
        ("fishes", "pisces", "fisch"),
        "Animals that swim.",
        ("http://example.org/s/animals",),
    ),
    ("mice", "http://example.org/s/mice", (), "Small rodents.", ("http://example.org/s/animals",)),
]
ENTITIES = "".join(f'<!ENTITY e{i} "{10 * f"&e{i - 1};"}">' for i in range(1, 10))
BOMB = (
    f'<!DOCTYPE rdf:RDF [<!ENTITY e0 "0123456789">{ENTITIES}]>'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" '
    'xmlns="http://www.w3.org/2004/02/skos/core#"><Concept rdf:about="http://a/1">'
    "<prefLabel{}>{}</prefLabel></Concept></rdf:RDF>"
)


@pytest.mark.parametrize(
    ("suffix", "form"),
    [("ttl", "turtle"), ("rdf", "xml"), ("jsonld", "json-ld"), ("nt", "nt"), ("ttl.gz", "turtle")],
)
def test_a_skos_vocabulary_is_the_same_table_in_every_format(tmp_path, suffix, form):
    content = rdflib.Graph().parse(data=TURTLE).serialize(format=form).encode()
    path = tmp_path / f"vocabulary.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)

    table = load_label_table(path, language="en")

    assert list(table.rows()) == ROWS
    assert table.broader_matrix().toarray().tolist() == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]


def test_labels_have_the_chosen_language_or_else_another(tmp_path, caplog):
    path = tmp_path / "vocabulary.ttl"
    path.write_text(TURTLE)

    table = load_label_table(path, language="fi")

    assert table.names == ("eläimet", "kalat", "mice")
    assert "1 of 3 labels have no name in 'fi'" in caplog.text


@pytest.mark.parametrize(
    ("language", "message"),
    [
        (None, "has labels in en, fi; choose one with language="),
        ("sv", "no labels in the language 'sv'; use one of: en, fi"),
    ],
)
@pytest.mark.parametrize("suffix", ["ttl", "csv"])
def test_a_language_has_to_be_chosen_among_several(tmp_path, language, message, suffix):
    path = tmp_path / f"vocabulary.{suffix}"
    path.write_text(TURTLE if suffix == "ttl" else "uri,label_en,label_fi\na,fish,kalat\n")

    with pytest.raises(DataError, match=message):
        load_label_table(path, language=language)


def test_concepts_without_labels_are_named_by_their_uris_with_a_warning(tmp_path, caplog):
    path = tmp_path / "vocabulary.ttl"
    path.write_text("@prefix skos: <http://www.w3.org/2004/02/skos/core#> . <u:1> a skos:Concept .")

    assert load_label_table(path).names == ("u:1",)
    assert "1 of 1 labels have no name; the URI is used" in caplog.text


def test_labels_without_a_language_fit_any(tmp_path, caplog):
    path = tmp_path / "vocabulary.nt"
    skos, rdf = (
        "http://www.w3.org/2004/02/skos/core#",
        "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
    )
    path.write_text(
        f'<http://a/1> <{rdf}type> <{skos}Concept> .\n<http://a/1> <{skos}prefLabel> "fish" .\n'
    )

    assert load_label_table(path, language="fi").names == ("fish",)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.ttl", "@prefix skos <", "not valid turtle"),
        ("a.rdf", "<rdf:RDF", "not valid xml"),
        ("a.jsonld", "{", "not valid JSON"),
        ("a.ttl", "<http://a> <http://b> <http://c> .", "no skos:Concept"),
        ("a.jsonld", json.dumps({"@context": "http://a.invalid/c"}), "context at another address"),
        ("a.jsonld", json.dumps([{"x": {"@context": ["c.json"]}}]), "context at another address"),
        ("a.jsonld", json.dumps({"@context": [[["c.json"]]]}), "context at another address"),
        ("a.jsonld", json.dumps({"@context": {"@import": "c.json"}}), "context at another address"),
        ("a.rdf", BOMB.format("", "&e9;"), "a text has more than 20,000 characters"),
        ("a.rdf", BOMB.format("", "a\n<b/>" * 12_000), "a text has more than 20,000 characters"),
        (
            "a.rdf",
            BOMB.format(' rdf:parseType="Literal"', "<b>ab</b>" * 8000),
            "a text has more than 20,000 characters",
        ),
    ],
)
def test_what_is_not_a_vocabulary_is_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)

    with pytest.raises(DataError, match=message) as caught:
        load_label_table(path)
    assert "\n" not in str(caught.value)


def test_entities_and_xml_literals_of_usual_length_are_read(tmp_path):
    path = tmp_path / "a.rdf"
    path.write_text(BOMB.format("", "fish &e0;"))
    assert load_label_table(path).names == ("fish 0123456789",)

    path.write_text(BOMB.format(' rdf:parseType="Literal"', "<b>fish</b>" * 100))
    assert load_label_table(path).names[0].count("fish") == 100


def test_a_value_that_rdflib_cannot_read_is_no_traceback(tmp_path, caplog):
    path = tmp_path / "a.ttl"
    integer = "<http://www.w3.org/2001/XMLSchema#integer>"
    path.write_text(TURTLE + f':fish skos:notation "many"^^{integer} .')

    assert load_label_table(path, language="en").names == ("animals", "fish", "mice")
    assert not caplog.records


def test_without_rdflib_the_error_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.ttl"
    path.write_text(TURTLE)
    monkeypatch.setitem(sys.modules, "rdflib", None)

    with pytest.raises(DataError, match=r"install elias-xmc\[skos\]"):
        load_label_table(path)


def test_a_tsv_vocabulary_of_annif_has_uris_labels_and_sometimes_notations(tmp_path):
    path = tmp_path / "vocabulary.tsv"
    path.write_text("<http://a/1>\tanimals\n<http://a/2>\tfish, cod\t59.1\n<http://a/3>\n")

    table = load_label_table(path)

    assert (table.names, table.ids) == (("animals", "fish, cod"), ("http://a/1", "http://a/2"))


def test_a_csv_vocabulary_of_annif_has_a_column_for_each_language(tmp_path):
    path = tmp_path / "vocabulary.csv"
    path.write_text("uri,label_en,label_fi,notation\n<http://a/1>,fish,kalat,59\n")

    table = load_label_table(path, language="fi")

    assert (table.names, table.ids) == (("kalat",), ("http://a/1",))


def test_a_csv_vocabulary_of_annif_may_have_gaps_and_concepts_no_longer_used(tmp_path, caplog):
    path = tmp_path / "vocabulary.csv"
    path.write_text("uri,label_en,label_fi\nu:1,fish,\nu:2,,\nu:3,mice,hiiret\n")

    table = load_label_table(path, language="fi")

    assert (table.names, table.ids) == (("fish", "hiiret"), ("u:1", "u:3"))
    assert "1 of 2 labels have no name in 'fi'" in caplog.text


def test_a_corpus_of_uris_gets_the_names_of_the_vocabulary(tmp_path):
    (tmp_path / "vocabulary.ttl").write_text(TURTLE)
    rows = "Cod quotas\t<http://example.org/s/fish>\nPets\t<http://example.org/s/mice>\n"
    (tmp_path / "corpus.tsv").write_text(rows)

    corpus = load_corpus(
        tmp_path / "corpus.tsv",
        label_table=tmp_path / "vocabulary.ttl",
        language="en",
        test_size=0,
    )

    assert corpus.label_names.names == ("fish", "mice", "animals")
    assert corpus.label_names.texts()[0] == "fish. fishes. pisces. fisch. Animals that swim."
    assert corpus.reading["language"] == "en"
