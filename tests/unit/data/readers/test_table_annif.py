"""Corpora of Annif: short-text TSV and CSV files, and full-text folders."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest

from elias.data import load_corpus
from elias.data.load import TextFile
from elias.data.readers import files
from elias.errors import DataError

COD, SEA, WINE = (f"http://example.org/s/{name}" for name in ("cod", "sea", "wine"))


def rows(corpus, split="train"):
    points = corpus.split(split)
    return [
        (text, [corpus.label_names[label] for label in points.labels[row].indices])
        for row, text in enumerate(points.texts)
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("on_disk", ["on", "off"])
def test_a_short_text_file_is_read_as_it_is(tmp_path, monkeypatch, packed, on_disk):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Annif splits at the first tab, and the rest at any white space
    content = f'The "cod" war\t<{COD}> <{SEA}>\nRed wine\t<{WINE}>\t{SEA}\nNothing\t\nNo tab\n'
    path = tmp_path / ("a.tsv.gz" if packed else "a.tsv")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())

    corpus = load_corpus(path, test_size=0, on_disk=on_disk)

    assert corpus.format == "annif"
    assert rows(corpus) == [
        ('The "cod" war', [COD, SEA]),
        ("Red wine", [SEA, WINE]),
        ("Nothing", []),
        ("No tab", []),
    ]


def test_the_texts_of_a_short_text_file_can_be_predicted(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(f"Cod\t<{COD}>\nWine\t<{WINE}>\n")

    texts = [row.text for row in TextFile.find(path).rows()]

    assert texts == ["Cod", "Wine"]


@pytest.mark.parametrize("bracket", ["<{}>", "{}"])
def test_a_csv_file_has_subject_uris(tmp_path, bracket):
    first, second = bracket.format(COD + ",x"), bracket.format(SEA)
    path = tmp_path / "a.csv"
    path.write_text(f'document_id,text,subject_uris\n1,Cod,"{first} {second}"\n2,Sea,{second}\n')

    corpus = load_corpus(path, test_size=0)

    assert rows(corpus) == [("Cod", [COD + ",x", SEA]), ("Sea", [SEA])]
    again = load_corpus(path, **corpus.reading)
    assert rows(again) == rows(corpus)


def test_tags_in_angle_brackets_are_not_uris(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("text\ttags\nread a file\t<python><pandas>\njoin\t<sql>\n")

    assert load_corpus(path, test_size=0).label_names == ["pandas", "python", "sql"]


def write_documents(folder, documents):
    folder.mkdir(parents=True)
    for name, content in documents.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize("on_disk", ["on", "off"])
def test_a_full_text_folder_has_documents_and_their_subjects(tmp_path, monkeypatch, on_disk):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_documents(
        tmp_path / "docs",
        {
            "a.txt": "Cod quotas\nin the sea.\n",
            "a.tsv": f"<{COD}>\tcod\n<{SEA}>\tsea\n",
            "b.txt": "Red wine.",
            "b.key": "wine\n\nfood and drink\n",
            "c.txt": "No subjects.",
            "README.md": "about",
        },
    )

    corpus = load_corpus(tmp_path / "docs", test_size=0, on_disk=on_disk)

    assert corpus.format == "full-text"
    assert rows(corpus) == [
        ("Cod quotas\nin the sea.", [COD, SEA]),
        ("Red wine.", ["food and drink", "wine"]),
    ]
    assert "1 without" in corpus.notes["text"]


def test_subfolders_are_the_splits_of_a_full_text_corpus(tmp_path):
    for number, split in enumerate(("train", "validate", "test", "maui-train")):
        document = {f"{number}.txt": split, f"{number}.key": "cod"}
        write_documents(tmp_path / split, document)

    corpus = load_corpus(tmp_path)

    assert {name: list(split.texts) for name, split in corpus.splits.items()} == {
        "train": ["train"],
        "validation": ["validate"],
        "test": ["test"],
    }


def test_options_of_tables_are_refused_for_a_full_text_folder(tmp_path):
    write_documents(tmp_path / "docs", {"a.txt": "Cod.", "a.key": "cod"})

    with pytest.raises(DataError, match="labels= has no meaning"):
        load_corpus(tmp_path / "docs", labels="tags")


def test_a_document_takes_little_more_memory_than_its_size(tmp_path):
    write_documents(tmp_path / "docs", {"a.txt": "a\n" * 500_000, "a.key": "cod"})

    tracemalloc.start()
    try:
        corpus = load_corpus(tmp_path / "docs", test_size=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(corpus.split("train").texts[0]) == 999_999
    assert peak < 10 * 2**20


def test_a_document_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 2**20)
    write_documents(tmp_path / "docs", {"a.txt": "a\n" * 600_000, "a.key": "cod"})

    with pytest.raises(DataError, match=r"a\.txt: the text is longer than 1 MiB"):
        load_corpus(tmp_path / "docs", test_size=0)
