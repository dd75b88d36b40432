from collections import Counter, defaultdict

import numpy as np
import pytest
from scipy.sparse import load_npz

from elias.data import synthetic
from elias.data.synthetic import CorpusGenerator, synthetic_corpus, write_synthetic
from elias.errors import DataError


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def draw(**options):
    """A generator and, for each label rank of its training points, the topics it was seen in."""
    generator = CorpusGenerator(**options)
    rank_of = np.argsort(generator.ids)
    topics_of = defaultdict(Counter)
    for _, lengths, label_ids, topics in generator.chunks("train"):
        of_labels = np.repeat(topics, lengths)
        for label, topic in zip(label_ids.tolist(), of_labels.tolist(), strict=True):
            topics_of[rank_of[label]][topic] += 1
    return generator, topics_of


def test_the_folder_holds_the_same_corpus_as_memory(tmp_path):
    corpus = synthetic_corpus(300, 90, seed=5, n_validation=20)

    folder = write_synthetic(tmp_path / "c", n_points=300, n_labels=90, seed=5, n_validation=20)

    assert lines(folder / "raw" / "Y.txt") == corpus.label_names
    for name, prefix in (("train", "trn"), ("validation", "val"), ("test", "tst")):
        split = corpus.split(name)
        labels = load_npz(folder / f"Y.{prefix}.npz")
        assert lines(folder / "raw" / f"{prefix}_X.txt") == split.texts
        assert labels.shape == split.labels.shape
        assert (labels != split.labels).nnz == 0


def test_a_seed_decides_every_byte(tmp_path):
    first = write_synthetic(tmp_path / "a", n_points=200, n_labels=50, seed=1)
    again = write_synthetic(tmp_path / "b", n_points=200, n_labels=50, seed=1)
    other = write_synthetic(tmp_path / "c", n_points=200, n_labels=50, seed=2)

    assert files_of(first) == files_of(again)
    assert files_of(first) != files_of(other)


@pytest.mark.parametrize(("n_points", "n_labels"), [(1, 1), (3, 40), (40, 3), (257, 64)])
def test_any_size_gives_points_with_text_and_sorted_labels(n_points, n_labels):
    corpus = synthetic_corpus(n_points, n_labels)

    assert (len(corpus.train), corpus.n_labels) == (n_points, n_labels)
    assert len(set(corpus.label_names)) == n_labels
    assert corpus.test is not None
    for split in corpus.splits.values():
        assert all(split.texts)
        assert np.diff(split.labels.indptr).min() >= 1
        assert split.labels.has_canonical_format


@pytest.mark.parametrize(
    ("n_points", "n_labels", "labels_per_point"), [(60, 60, 1), (100, 250, 3), (2000, 500, 2)]
)
def test_every_label_gets_a_training_point_where_the_points_allow_it(
    n_points, n_labels, labels_per_point
):
    corpus = synthetic_corpus(n_points, n_labels, labels_per_point=labels_per_point, modes=2)

    assert corpus.label_frequencies().min() >= 1
    assert "Each of the" in corpus.notes["coverage"]


def test_labels_beyond_the_points_are_counted_and_said(tmp_path, caplog):
    folder = write_synthetic(tmp_path / "c", n_points=20, n_labels=1000)

    labels = load_npz(folder / "Y.trn.npz")
    n_missing = 1000 - len(set(labels.indices.tolist()))
    assert f"{n_missing} of 1,000 labels have no training point" in caplog.text
    assert f"{n_missing} of 1,000 labels" in (folder / "SOURCE.md").read_text()


def test_points_of_a_label_with_modes_fall_in_as_many_unrelated_topics():
    generator, topics_of = draw(n_points=2000, n_labels=200, modes=3, seed=3)
    _, n_two, n_three = generator.n_with_mode

    assert 0 < n_three < n_two < 200
    assert all(len(topics_of[rank]) == 3 for rank in range(n_three))
    assert all(len(topics_of[rank]) == 1 for rank in range(n_two, 200))
    # no mode is a side show, and labels that share one topic part company in the others
    assert all(min(topics_of[rank].values()) >= 2 for rank in range(n_three // 2))
    assert len({tuple(sorted(topics_of[rank])) for rank in range(n_three)}) > n_three / 2


def test_a_label_has_different_words_in_each_topic(monkeypatch):
    for name, value in {"NOISE_WORDS": 0, "LABEL_SIGNAL": 1.0, "VOCABULARY": 500_000}.items():
        monkeypatch.setattr(synthetic, name, value)
    generator = CorpusGenerator(n_points=3000, n_labels=60, modes=2, labels_per_point=1)
    head = generator.ids[0]
    words_by_topic = defaultdict(set)
    for texts, _, label_ids, topics in generator.chunks("train"):
        for text, label, topic in zip(texts, label_ids, topics, strict=True):
            if label == head:
                words_by_topic[topic].update(text.split())

    first, second = words_by_topic.values()

    assert first.isdisjoint(second)


def test_with_one_mode_every_label_has_one_topic():
    _, topics_of = draw(n_points=500, n_labels=100, modes=1)

    assert all(len(topics) == 1 for topics in topics_of.values())


def test_a_longer_tail_makes_head_labels_more_frequent():
    def share_of_the_head(tail):
        counts = np.sort(synthetic_corpus(3000, 300, tail=tail, modes=1).label_frequencies())
        return counts[-30:].sum() / counts.sum()

    flat, zipf, steep = map(share_of_the_head, (0.0, 1.0, 1.5))

    assert flat < 0.2
    assert flat + 0.1 < zipf < steep - 0.1


def test_points_have_the_labels_asked_for_on_average():
    corpus = synthetic_corpus(4000, 500, labels_per_point=4.5)

    assert corpus.train.labels.nnz / len(corpus.train) == pytest.approx(4.5, rel=0.05)


def test_test_points_are_not_training_points():
    corpus = synthetic_corpus(1000, 100)

    assert set(corpus.train.texts).isdisjoint(corpus.test.texts)


@pytest.mark.parametrize(
    ("name", "value"), [("n_labels", 0), ("tail", -1.0), ("labels_per_point", 0.5), ("modes", 0)]
)
def test_a_value_that_makes_no_corpus_is_refused_by_name(name, value):
    with pytest.raises(DataError, match=name):
        synthetic_corpus(**{"n_points": 10, "n_labels": 10, name: value})


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "kept").touch()

    with pytest.raises(DataError, match="already exists"):
        write_synthetic(tmp_path, n_points=10, n_labels=10)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
