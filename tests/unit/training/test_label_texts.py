import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.config import (
    EliasConfig,
    EncoderConfig,
    EvalConfig,
    IndexConfig,
    LossConfig,
    RerankConfig,
    StageConfig,
)
from elias.text.tokens import Tokens
from elias.text.vectorizer import SplitTexts
from elias.training import label_texts
from elias.training.label_texts import (
    MIN_TARGET,
    SMOOTHING,
    LabelPoints,
    co_occurrence,
    label_targets,
    naming_shares,
)
from elias.training.train import train

SWAPPED = {"cod": "tape", "tape": "ship", "ship": "cod"}
ZEROS_AND_ONES = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def random_ones(rng, shape, share):
    return (rng.random(shape) < share).astype(np.float32)


def slow_shares(names, texts, labels):
    """Compare every name with every text."""
    naming = [
        [t for t in range(len(texts)) if name.any() and (texts[t] >= name).all()] for name in names
    ]
    right = [sum(labels[t, i] for t in rows) for i, rows in enumerate(naming)]
    shares = [r / len(rows) for r, rows in zip(right, naming, strict=True) if rows]
    mean = np.mean(shares) if shares else 0
    pairs = zip(right, naming, strict=True)
    return [(r + SMOOTHING * mean) / (len(rows) + SMOOTHING) for r, rows in pairs]


@given(ZEROS_AND_ONES)
def test_naming_shares_agree_with_a_comparison_of_every_name_with_every_text(rng):
    names, texts = random_ones(rng, (5, 4), 0.3), random_ones(rng, (7, 4), 0.6)
    labels = random_ones(rng, (7, 5), 0.5)

    shares = naming_shares(*map(csr_matrix, (names, texts, labels)))

    np.testing.assert_allclose(shares, slow_shares(names, texts, labels), rtol=1e-6)


@given(ZEROS_AND_ONES, st.integers(1, 4))
def test_co_occurrence_agrees_with_dense_counts(rng, n_neighbours):
    labels = random_ones(rng, (8, 5), 0.4)
    counts = labels.T @ labels
    expected = counts / (np.diag(counts)[:, None] + SMOOTHING)
    np.fill_diagonal(expected, 0)
    expected[expected < MIN_TARGET] = 0
    order = np.argsort(-expected, axis=1, kind="stable")
    np.put_along_axis(expected, order[:, n_neighbours:], 0, axis=1)

    shares = co_occurrence(csr_matrix(labels), n_neighbours)

    np.testing.assert_allclose(shares.toarray(), expected, rtol=1e-6)


def test_work_in_chunks_gives_the_same_result(monkeypatch):
    monkeypatch.setattr(label_texts, "_PAIRS", 3)
    rng = np.random.default_rng(0)
    names, texts = random_ones(rng, (9, 4), 0.3), random_ones(rng, (20, 4), 0.6)
    labels = random_ones(rng, (20, 9), 0.5)
    arguments = [csr_matrix(matrix) for matrix in (names, texts, labels)]
    in_chunks = naming_shares(*arguments), co_occurrence(arguments[2]).toarray()

    monkeypatch.setattr(label_texts, "_PAIRS", 1000)

    np.testing.assert_array_equal(naming_shares(*arguments), in_chunks[0])
    np.testing.assert_array_equal(co_occurrence(arguments[2]).toarray(), in_chunks[1])


def test_a_label_text_targets_its_label_as_often_as_texts_that_contain_it_have_the_label():
    texts = ["Red cod fillets", "cod and red tape", "blue tape", "old tape"]
    labels = csr_matrix([[1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1]], dtype=np.float32)

    names = ["cod, red #17", "tape", "2012"]

    own = label_targets(names, SplitTexts(texts), labels).toarray().diagonal()

    assert own[0] == pytest.approx((2 + SMOOTHING / 2) / (2 + SMOOTHING))  # 2 of 2; mean 1/2
    assert own[1] == pytest.approx((0 + SMOOTHING / 2) / (3 + SMOOTHING))  # 0 of 3
    assert own[2] == 0  # an identifier, not a text


@pytest.mark.parametrize(("weight", "per_epoch"), [(0, []), (2, [6])])
def test_label_texts_are_trained_on_as_often_as_their_weight_says(weight, per_epoch, tmp_path):
    texts = [f"{word} {other}" for word in ("cod", "tape", "ship") for other in "abcdefgh"]
    labels = [[text.split()[0]] for text in texts]
    config = EliasConfig(
        index=IndexConfig(kind="all"),
        loss=LossConfig(label_text_weight=weight),
        stages=(StageConfig(name="all", epochs=1, batch_size=8),),
        rerank=RerankConfig(enabled=False),
        encoder=EncoderConfig(dim=8, hidden_dim=8),
        eval=EvalConfig(validation_size=0),
    )

    train(None, config, tmp_path / "run", texts=texts, labels=labels, device="cpu")

    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    recorded = [event["per_epoch"] for event in events if event["event"] == "label texts"]
    assert recorded == per_epoch  # every text with the name of a label has this label


@pytest.mark.parametrize(
    ("names", "changes", "is_trained"),
    [
        (SWAPPED, {}, True),  # no text has the label it names
        ({"cod": "E11.9", "tape": "J45", "ship": "cod"}, {}, False),  # most labels are codes
        (SWAPPED, {"label_contrast": False}, False),
        (SWAPPED, {"label_text_weight": 0}, False),
        (SWAPPED, {"label_text_weight": 0, "label_contrast": True}, True),
    ],
)
def test_stage_0_needs_label_texts_for_half_of_the_points(names, changes, is_trained, tmp_path):
    texts = [f"{word} {other}" for word in names for other in "abcdefgh"]
    labels = [[names[text.split()[0]]] for text in texts]
    config = EliasConfig(
        index=IndexConfig(kind="all"),
        loss=LossConfig(**changes),
        stages=(StageConfig(name="all", epochs=1, batch_size=8),),
        rerank=RerankConfig(enabled=False),
        encoder=EncoderConfig(dim=8, hidden_dim=8),
        eval=EvalConfig(validation_size=0),
    )

    train(None, config, tmp_path / "run", texts=texts, labels=labels, device="cpu")

    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert ("contrast" in [event.get("step") for event in events]) == is_trained
    has_points = "label_text_weight" not in changes
    assert ("label texts" in [event["event"] for event in events]) == has_points


def make_points(copies):
    tokens = Tokens(offsets=np.arange(4) * 2, ids=np.arange(6, dtype=np.int32))
    targets = csr_matrix(np.array([[1, 0.5, 0], [0, 1, 0.25], [0, 0, 0.75]], dtype=np.float32))
    return LabelPoints(tokens, targets, np.array(copies))


def test_the_points_of_an_epoch_depend_on_the_seed_only():
    points = make_points([20.0, 10, 15])

    first, again, other = points.draw([0, 1]), points.draw([0, 1]), points.draw([0, 2])

    assert len(first.tokens) == first.labels.shape[0] == points.n_drawn == 45
    assert first.tokens.ids.tolist() == again.tokens.ids.tolist()
    assert (first.labels != again.labels).nnz == 0
    assert (first.labels != other.labels).nnz > 0


def test_targets_are_drawn_with_their_probability():
    points = make_points([10_000.0, 10_000, 5000])

    drawn = points.draw([0])

    for text, expected in enumerate(points.targets.toarray()):
        rows = np.flatnonzero(drawn.tokens.ids[::2] == 2 * text)
        assert len(rows) == pytest.approx(points.copies[text], abs=1)
        share = np.asarray(drawn.labels[rows].mean(axis=0)).ravel()
        np.testing.assert_allclose(share, expected, atol=0.03)


def test_a_text_is_drawn_as_often_as_its_copies_say():
    points = make_points([0.75, 0.5, 0.25])  # 1.5 texts, so 2 in each epoch

    ids = np.concatenate([points.draw([0, epoch]).tokens.ids[::2] for epoch in range(2000)])

    shares = np.bincount(ids // 2) / len(ids)
    np.testing.assert_allclose(shares, [0.5, 1 / 3, 1 / 6], atol=0.03)
