"""Writing a corpus and reading it again gives the same corpus, whatever the format."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.data import SPLITS, Corpus, Split, convert, load_corpus
from elias.data.writers import one_line

pytestmark = pytest.mark.slow

TABLES = ("jsonl", "csv", "tsv", "parquet")
LINES = ("folder", "xmc", "pecos")

# NUL and lone surrogates are replaced when read; a byte-order mark goes from a file's start.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
TEXTS = st.text(CHARACTERS, max_size=12)
NAMES = st.one_of(
    st.text(CHARACTERS, max_size=6),
    st.sampled_from(
        ["", " ", "a", "a,b", "a|b", "a;b", 'q"q', "[1]", "7", "10", "007", "a\nb", "é"]
    ),
)
WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 0.25, np.float32(0.1)])
FEATURES = st.sampled_from([0.0, 1.0, -2.5, 1e-30, np.float32(1 / 3)])


def matrix(draw, values, shape):
    cells = draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return csr_matrix(np.array(cells, dtype=np.float32).reshape(shape))


@st.composite
def corpora(draw, weights=WEIGHTS, names=NAMES):
    label_names = draw(st.lists(names, min_size=1, max_size=4))
    n_labels = len(label_names)
    splits = {}
    for name in ("train", *draw(st.sets(st.sampled_from(SPLITS[1:])))):
        n_points = draw(st.integers(1, 4))
        labels = matrix(draw, weights, (n_points, n_labels))
        if name == "train":
            labels = labels.tolil()
            labels[0, 0] = 1
            labels = labels.tocsr()
        pairs = st.tuples(st.integers(0, n_points - 1), st.integers(0, n_labels - 1))
        filters = draw(st.none() | st.lists(pairs, max_size=3))
        splits[name] = Split(
            labels=labels,
            texts=draw(st.lists(TEXTS, min_size=n_points, max_size=n_points)),
            features=matrix(draw, FEATURES, (n_points, 3)),
            filters=None if filters is None else np.array(filters, dtype=np.int64).reshape(-1, 2),
        )
    return Corpus(label_names=label_names, **splits)


def round_trip(corpus, format):
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "corpus"
        convert(corpus, target, format)
        return load_corpus(target)


def assert_same_matrix(left, right):
    assert left.shape == right.shape
    np.testing.assert_array_equal(left.toarray(), right.toarray())


def assert_same_labels(before, after):
    """Equal but for labels that no point has, which a table cannot name."""
    used = {i for split in before.splits.values() for i in split.labels.indices.tolist()}
    assert {i: after.label_names[i] for i in used} == {i: before.label_names[i] for i in used}
    for name, split in before.splits.items():
        got = after.splits[name].labels
        np.testing.assert_array_equal(got.toarray(), split.labels.toarray()[:, : got.shape[1]])
        assert got.nnz == split.labels.nnz


@pytest.mark.parametrize("format", TABLES)
@given(corpus=corpora())
def test_a_table_brings_texts_labels_and_relevance_back(format, corpus):
    after = round_trip(corpus, format)

    assert list(after.splits) == list(corpus.splits)
    assert_same_labels(corpus, after)
    for name, split in corpus.splits.items():
        assert after.splits[name].texts == split.texts


def assert_same_folder(before, after, clean):
    assert list(after.splits) == list(before.splits)
    assert after.label_names == [clean(name) for name in before.label_names]
    for name, split in before.splits.items():
        got = after.splits[name]
        assert got.texts == [clean(text) for text in split.texts]
        assert_same_matrix(got.labels, split.without_filtered_labels().labels)
        assert_same_matrix(got.features, split.features)
        assert (got.filters is None) == (split.filters is None)
        if split.filters is not None:
            np.testing.assert_array_equal(got.filters, split.filters)


@pytest.mark.parametrize("format", LINES)
@given(corpus=corpora(weights=st.sampled_from([0.0, 1.0])))
def test_a_folder_of_lines_brings_all_back_but_line_ends(format, corpus):
    assert_same_folder(corpus, round_trip(corpus, format), one_line)


@pytest.mark.parametrize("format", ["folder", "pecos"])
@given(corpus=corpora())
def test_a_folder_of_matrices_keeps_relevance(format, corpus):
    assert_same_folder(corpus, round_trip(corpus, format), one_line)


@given(corpus=corpora())
def test_an_lf_folder_brings_all_back(corpus):
    assert_same_folder(corpus, round_trip(corpus, "lf"), str)


@given(
    name=st.sampled_from(TABLES),
    names=st.lists(st.text("ab,;| \"'[]{}\t", min_size=1, max_size=4), min_size=1, unique=True),
)
@example(name="csv", names=["a", "a|b"])
@example(name="tsv", names=["a\tb", "[]"])
def test_names_full_of_separators_are_never_split(name, names):
    ordered = sorted(names)
    labels = csr_matrix(np.ones((1, len(names)), dtype=np.float32))
    corpus = Corpus(train=Split(labels=labels, texts=["t"]), label_names=ordered)

    assert round_trip(corpus, name).label_names == ordered
