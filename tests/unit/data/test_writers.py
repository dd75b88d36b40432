"""Writing a corpus: the format, what it leaves out, and nothing half-written."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.data import Corpus, Split, convert, load_corpus, writers
from elias.data.writers import FORMATS
from elias.errors import DataError

TABLES = ("jsonl", "csv", "tsv", "parquet")


@pytest.fixture
def corpus():
    labels = csr_matrix(np.array([[1, 0, 1], [0, 1, 0]], dtype=np.float32))
    features = csr_matrix(np.array([[0.1, 0], [0, -3]], dtype=np.float32))
    return Corpus(
        train=Split(labels=labels, texts=["cod", "wine"], features=features),
        test=Split(labels=labels, texts=["c", "d"], features=features, filters=np.array([[1, 2]])),
        label_names=["a", "b", "c"],
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "jsonl"),
        ("a.JSONL.gz", "jsonl"),
        ("a.csv", "csv"),
        ("a.tsv.gz", "tsv"),
        ("a.parquet", "parquet"),
        ("folder", "folder"),
    ],
)
def test_the_suffix_chooses_the_format(tmp_path, corpus, name, expected):
    written = convert(corpus, tmp_path / name)

    assert (written.path, written.format) == (tmp_path / name, expected)
    assert load_corpus(tmp_path / name).train.texts == ["cod", "wine"]


@pytest.mark.parametrize("name", ["a.txt", "a.gz", "a.xlsx"])
def test_a_name_that_fits_no_format_is_refused(tmp_path, corpus, name):
    with pytest.raises(DataError, match="no format has this suffix"):
        convert(corpus, tmp_path / name)


def test_an_unknown_format_names_the_nearest(tmp_path, corpus):
    with pytest.raises(DataError, match="unknown format 'parket'; did you mean 'parquet'"):
        convert(corpus, tmp_path / "a", "parket")


@pytest.mark.parametrize("format", FORMATS)
def test_existing_files_are_kept_without_overwrite(tmp_path, corpus, format):
    target = tmp_path / "out"
    convert(corpus, target, format)
    smaller = corpus.with_splits(test=None)

    with pytest.raises(DataError, match="out: already exists"):
        convert(smaller, target, format)
    assert load_corpus(target).test is not None

    convert(smaller, target, format, overwrite=True)
    assert load_corpus(target).test is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_other_things_in_it_is_never_replaced(tmp_path, corpus):
    convert(corpus, tmp_path / "out")
    (tmp_path / "out" / "thesis.tex").write_text("years of work")

    with pytest.raises(DataError, match=r"contains thesis\.tex, which is not a corpus file"):
        convert(corpus, tmp_path / "out", overwrite=True)

    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_table_does_not_replace_a_folder(tmp_path, corpus):
    (tmp_path / "a.csv").mkdir()

    with pytest.raises(DataError, match="is a folder, but csv is written as a file"):
        convert(corpus, tmp_path / "a.csv", overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("format", ["csv", "lf"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_write_leaves_what_was_there(
    tmp_path, corpus, monkeypatch, error, format, overwrite
):
    target = tmp_path / "out"
    if overwrite:
        convert(corpus, target, format)

    def stop(*_):
        raise error

    monkeypatch.setattr(writers, "_write_delimited", stop)
    monkeypatch.setattr(writers, "_lf_points", stop)
    with pytest.raises(error):
        convert(corpus.with_splits(test=None), target, format, overwrite=overwrite)

    assert [path.name for path in tmp_path.iterdir()] == (["out"] if overwrite else [])
    if overwrite:
        assert load_corpus(target).test is not None


def test_a_target_that_cannot_be_written_is_refused(tmp_path, corpus):
    (tmp_path / "file").write_text("")

    for name in ("a.csv", "folder"):
        with pytest.raises(DataError, match=r"cannot be (written|created)"):
            convert(corpus, tmp_path / "file" / name)


@pytest.mark.parametrize("format", TABLES)
def test_a_table_says_what_it_leaves_out(tmp_path, format):
    grown = Corpus(
        train=Split(labels=csr_matrix(([1.0], [0], [0, 1]), shape=(1, 3)), texts=["a"]),
        test=Split(
            labels=csr_matrix((1, 3)),
            texts=["b"],
            features=csr_matrix((1, 2)),
            filters=np.zeros((0, 2), dtype=np.int64),
        ),
        label_names=["a", "b", "c"],
    )

    written = convert(grown, tmp_path / "out", format)

    assert written.left_out == (
        "features",
        "filter pairs",
        "the names of 2 labels that no point has",
    )


def test_xmc_leaves_out_relevance_other_than_1(tmp_path, corpus):
    labels = corpus.train.labels * 0.5
    weighted = corpus.with_splits(train=Split(labels=labels, features=corpus.train.features))

    assert convert(corpus, tmp_path / "a", "xmc").left_out == ()
    assert convert(weighted, tmp_path / "b", "xmc").left_out == ("relevance other than 1",)


def test_xmc_needs_features(tmp_path, corpus):
    texts_only = corpus.with_splits(
        train=Split(labels=corpus.train.labels, texts=["a", "b"]), test=None
    )

    with pytest.raises(DataError, match="no features, which the xmc format needs"):
        convert(texts_only, tmp_path / "out", "xmc")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", [*TABLES, "lf"])
def test_formats_of_texts_need_texts(tmp_path, corpus, format):
    features_only = corpus.with_splits(
        train=Split(labels=corpus.train.labels, features=corpus.train.features), test=None
    )

    with pytest.raises(DataError, match=r"no texts.*write it as xmc, folder or pecos"):
        convert(features_only, tmp_path / "out", format)

    assert list(tmp_path.iterdir()) == []


def test_csv_cells_join_names_by_a_bar_where_that_can_be_read_back(tmp_path, corpus):
    convert(corpus, tmp_path / "a.csv")
    convert(
        Corpus(train=corpus.train, label_names=["a", "b", "c|d"]),
        tmp_path / "b.csv",
    )

    assert '"a|c"' in (tmp_path / "a.csv").read_text()
    assert '"[""a"", ""c|d""]"' in (tmp_path / "b.csv").read_text()
    assert load_corpus(tmp_path / "b.csv").label_names == ["a", "b", "c|d"]


@pytest.mark.parametrize("names", [["(a)", "b", "c"], ["[1]", "b", "c"], ["b", "c", "{'d'}"]])
def test_names_that_look_like_lists_come_back_as_names(tmp_path, corpus, names):
    convert(Corpus(train=corpus.train, label_names=names), tmp_path / "a.csv")

    assert load_corpus(tmp_path / "a.csv").label_names == names


def test_lone_surrogates_do_not_stop_a_write(tmp_path, corpus):
    odd = Split(labels=corpus.train.labels, texts=["\ud800", "b"])

    convert(corpus.with_splits(train=odd, test=None), tmp_path / "a.jsonl")

    assert load_corpus(tmp_path / "a.jsonl").train.texts == ["\ufffd", "b"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_the_same_corpus_gives_the_same_bytes(tmp_path, corpus, name):
    for folder in ("one", "two"):
        convert(corpus, tmp_path / folder / name)

    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_old_name_of_the_result_warns():
    import elias.data

    with pytest.warns(DeprecationWarning, match="ConversionResult"):
        assert elias.data.Written is elias.data.ConversionResult
