"""Stage 0: the encoder learns to place texts near the texts of their labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, EncoderConfig
from elias.model.batch_inference import embed_all
from elias.model.encoder import BagEncoder
from elias.model.transformer import TransformerEncoder
from elias.text.tokens import Tokens
from elias.text.vectorizer import Featurizer
from elias.training import contrastive, trainer
from elias.training.contrastive import (
    GROUP_SIZE,
    TEMPERATURE,
    PairSampler,
    contrast_batch_size,
    contrast_loss,
    grouped_batches,
    near_groups,
    train_by_contrast,
)
from elias.training.initialization import StageInitializer
from elias.training.optimizer import Optimizer
from elias.training.stage import Points
from elias.training.train import train
from stages import make_stage
from tiny_bert import save_tiny_bert

WORDS = ["red", "cod", "tape", "north", "sea", "quota"]


@given(seed=st.integers(0, 2**31), n_texts=st.integers(1, 5), n_labels=st.integers(1, 4))
def test_the_loss_is_the_cross_entropy_of_pairs_without_other_positives(seed, n_texts, n_labels):
    rng = np.random.default_rng(seed)
    phi = rng.standard_normal((n_texts + n_labels, 3))
    relevant = rng.random((n_texts, n_labels)) < 0.3
    own = rng.integers(0, n_labels, n_texts)
    relevant[np.arange(n_texts), own] = True

    unit = phi / np.linalg.norm(phi, axis=1, keepdims=True)
    scores = np.exp(unit[:n_texts] @ unit[n_texts:].T / TEMPERATURE)
    losses = []
    for text, label in enumerate(own):
        pair = scores[text, label]
        other_labels = scores[text][~relevant[text]].sum()
        other_texts = scores[:, label][~relevant[:, label]].sum()
        losses += [-np.log(pair / (pair + other)) for other in (other_labels, other_texts)]

    loss = contrast_loss(*map(torch.from_numpy, (phi, relevant, own)))

    np.testing.assert_allclose(loss, np.mean(losses), atol=1e-9)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("kind", ["bag", "transformer"])
def test_texts_come_near_the_texts_of_their_labels(kind, near, tmp_path, monkeypatch):
    monkeypatch.setattr(contrastive, "NEAR_TEXTS", near)
    torch.manual_seed(0)
    words, names = ["red", "cod", "north", "sea"], ["tape", "quota", "in", "the"]
    of_text = np.random.default_rng(0).integers(0, 4, 200)
    texts = [words[label] for label in of_text]
    stage = make_stage(batch_size=32)
    if kind == "bag":
        featurizer = Featurizer.fit([*texts, *names], char_ngrams=(0, 0), min_count=1)
        config = EncoderConfig(dim=16, hidden_dim=16)
        encoder = BagEncoder(config, featurizer, featurizer.n_features)
    else:
        encoder = TransformerEncoder.from_config(EncoderConfig(model=save_tiny_bert(tmp_path)))
        stage = replace(stage, encoder_lr=1e-3)
    labels = csr_matrix((np.ones(200), of_text, np.arange(201)), shape=(200, 5))
    labels.data[3] = 0  # a point without labels
    labels.eliminate_zeros()
    own = csr_matrix(np.eye(4, 5))  # the last label has no text
    points = Points(encoder.tokenize(texts), labels)
    label_texts = Points(encoder.tokenize(names), own)

    def share_right():
        phi, of_names = (embed_all(encoder.eval(), part.tokens) for part in (points, label_texts))
        of_names /= np.linalg.norm(of_names, axis=1, keepdims=True)
        return ((phi @ of_names.T).argmax(axis=1) == of_text).mean()

    before = share_right()
    train_by_contrast(encoder, points, label_texts, stage, seed=0)

    assert before < 0.8 < share_right() == 1


def random_points(rng, n_points, n_labels, share):
    """Return points whose only token is their number, and label texts of some labels."""
    labels = csr_matrix((rng.random((n_points, n_labels)) < share).astype(np.float32))
    named = np.flatnonzero(rng.random(n_labels) < 0.7)
    own = csr_matrix(np.eye(n_labels, dtype=np.float32)[named])
    texts = Tokens(np.arange(n_points + 1), np.arange(n_points, dtype=np.int32))
    label_texts = Tokens(np.arange(len(named) + 1), (1000 + named).astype(np.int32))
    return Points(texts, labels), Points(label_texts, own)


@given(seed=st.integers(0, 2**31))
def test_pairs_are_points_with_the_text_of_one_of_their_labels(seed):
    rng = np.random.default_rng(seed)
    points, label_texts = random_points(rng, 12, 6, 0.3)
    named = label_texts.labels.indices
    truth, rows = points.labels.toarray() > 0, rng.permutation(12)[:7]

    pairs = PairSampler(points, label_texts, rng).sample(rows)

    ids = pairs.tokens.ids.numpy()
    texts, labels, sampled = ids[: len(pairs)], ids[len(pairs) :] - 1000, pairs.sampled.numpy()
    assert texts.tolist() == [row for row in rows if truth[row][named].any()]
    assert set(labels[sampled]) == set(labels) <= set(named)
    assert truth[texts, labels[sampled]].all()
    assert (pairs.relevant.numpy() == truth[texts][:, labels]).all()


@given(seed=st.integers(0, 2**31))
def test_another_point_stands_for_a_label_without_a_text(seed):
    rng = np.random.default_rng(seed)
    points, label_texts = random_points(rng, 12, 6, 0.3)
    named = np.isin(np.arange(6), label_texts.labels.indices)
    truth, rows = points.labels.toarray() > 0, rng.permutation(12)[:7]
    usable = named | (truth.sum(axis=0) >= 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrastive, "MAX_SCORED_LABELS", 5)
        pairs = PairSampler(points, label_texts, rng).sample(rows)

    ids, sampled = pairs.tokens.ids.numpy(), pairs.sampled.numpy()
    texts, others, relevant = ids[: len(pairs)], ids[len(pairs) :], pairs.relevant.numpy()
    # a text is left out if it has no such label, or if it was drawn to stand for its own label
    assert set(sampled) == set(range(len(others)))
    assert set(texts) <= {row for row in rows if truth[row][usable].any()}
    for text, column in zip(texts, sampled, strict=True):
        other = others[column]
        assert relevant[text == texts, column].all()
        if other >= 1000:
            assert truth[text, other - 1000]
        else:
            assert other != text
            assert (truth[text] & truth[other] & ~named & usable).any()
    for column, other in enumerate(others):
        if other >= 1000:
            assert (relevant[:, column] == truth[texts, other - 1000]).all()
        else:
            assert (relevant[:, column] == (truth[texts] & truth[other]).any(axis=1)).all()


@pytest.mark.parametrize("has_texts", [True, False])
def test_rare_labels_are_sampled_more_often(has_texts, monkeypatch):
    monkeypatch.setattr(contrastive, "MAX_SCORED_LABELS", 1)
    labels = np.array([[1, 1]] + [[1, 0]] * 7 + [[0, 1]], dtype=np.float32)  # frequencies 8, 2
    tokens = Tokens(np.arange(10), np.arange(9, dtype=np.int32))
    names = slice(2 if has_texts else 0)
    label_texts = Points(tokens.part(names), csr_matrix(np.eye(2)[names]))
    points = Points(tokens, csr_matrix(labels))
    sampler = PairSampler(points, label_texts, np.random.default_rng(0))

    ids = [sampler.sample(np.zeros(1, np.int64)).tokens.ids[1].item() for _ in range(2000)]

    rare = np.array(ids) == (1 if has_texts else 8)
    # 1/√2 of 1/√2 + 1/√8, or 1/2 of 1/2 + 1/8
    assert rare.mean() == pytest.approx(2 / 3 if has_texts else 4 / 5, abs=0.03)


def test_texts_with_the_same_label_come_near_each_other(monkeypatch):
    monkeypatch.setattr(contrastive, "MAX_SCORED_LABELS", 3)
    torch.manual_seed(0)
    words = ["red", "cod", "north", "sea", "tape", "quota", "in", "the"]
    of_text = np.random.default_rng(0).integers(0, 8, 200)
    featurizer = Featurizer.fit(words, char_ngrams=(0, 0), min_count=1)
    config = EncoderConfig(dim=16, hidden_dim=16)
    encoder = BagEncoder(config, featurizer, featurizer.n_features)
    labels = csr_matrix((np.ones(200), of_text % 4, np.arange(201)), shape=(200, 4))
    points = Points(encoder.tokenize([words[word] for word in of_text]), labels)
    no_texts = Points(encoder.tokenize([]), csr_matrix((0, 4)))

    def nearest():
        phi = embed_all(encoder.eval(), encoder.tokenize(words))
        phi /= np.linalg.norm(phi, axis=1, keepdims=True)
        return (phi @ phi.T - 2 * np.eye(8)).argmax(axis=1)

    before = nearest()
    train_by_contrast(encoder, points, no_texts, make_stage(batch_size=32), seed=0)

    expected = (np.arange(8) + 4) % 8
    assert (before == expected).mean() < 0.5
    assert (nearest() == expected).all()


def test_stage_0_without_label_texts_never_asks_for_all_of_them(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(contrastive, "MAX_SCORED_LABELS", 1)
    texts, labels = texts_of_two_words()
    labels = [[str(WORDS.index(name)) for name in names] for names in labels]  # codes
    config = tiny_config(tmp_path, **{"rerank.enabled": True})
    monkeypatch.setattr(trainer.Trainer, "_use_all_label_texts", lambda _: pytest.fail("used"))

    model = train(None, config, tmp_path / "run", texts=texts, labels=labels, device="cpu")

    assert "contrastive training: loss" in caplog.text
    assert len(model.predict(texts[0], top_k=2)) == 2


@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 40), n_points=st.integers(0, 50))
def test_batches_of_groups_have_every_row_once_and_keep_groups_together(seed, batch_size, n_points):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 6, n_points)

    batches = list(grouped_batches(groups, batch_size, rng))

    rows = np.concatenate([np.zeros(0, np.int64), *batches])
    assert sorted(rows) == list(range(n_points))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    n_borders = np.count_nonzero(np.diff(groups[rows]))
    assert n_borders == max(0, len(np.unique(groups)) - 1)


def test_groups_hold_near_texts():
    rng = np.random.default_rng(0)
    of_text = rng.permutation(np.repeat(np.arange(16), GROUP_SIZE))
    centers = 10 * np.eye(16)
    embedding = (centers[of_text] + rng.standard_normal((128, 16)) + 50).astype(np.float32)

    groups = near_groups(embedding, seed=0)

    assert np.bincount(groups).tolist() == [GROUP_SIZE] * 16
    together = groups[:, None] == groups
    same = of_text[:, None] == of_text
    np.fill_diagonal(together, False)
    assert same[together].mean() > 0.5  # 0.055 at random


@pytest.mark.parametrize("n_texts", [1, 7])
def test_few_texts_are_one_group(n_texts):
    embedding = np.eye(n_texts, 8, dtype=np.float32)

    assert near_groups(embedding, seed=0).tolist() == [0] * n_texts


@given(batch_size=st.integers(1, 5000), longest=st.integers(1, 4096))
def test_a_transformer_has_larger_batches_unless_texts_are_long(batch_size, longest):
    tokens = Tokens(np.array([0, longest]), np.zeros(longest, dtype=np.int32))
    transformer = TransformerEncoder.__new__(TransformerEncoder)

    size = contrast_batch_size(transformer, tokens, batch_size)

    assert batch_size <= size <= max(batch_size, min(4 * batch_size, contrastive.MAX_BATCH_SIZE))
    assert size == batch_size or size * longest <= contrastive.MAX_BATCH_TOKENS
    bag = BagEncoder.__new__(BagEncoder)
    assert contrast_batch_size(bag, tokens, batch_size) == batch_size


@pytest.mark.parametrize(("most", "n_epochs"), [(100, 10), (35, 3), (5, 1)])
def test_many_points_have_fewer_epochs(most, n_epochs, monkeypatch):
    monkeypatch.setitem(contrastive.MAX_STEPS, "bag", most)
    encoder = BagEncoder(EncoderConfig(dim=4, hidden_dim=4), None, n_features=2000)
    points, label_texts = random_points(np.random.default_rng(0), 80, 6, 0.5)
    weights = np.ones(80, dtype=np.float32)
    points = Points(replace(points.tokens, weights=weights), points.labels)
    weights = weights[: len(label_texts.tokens)]
    label_texts = Points(replace(label_texts.tokens, weights=weights), label_texts.labels)
    steps = []
    monkeypatch.setattr(Optimizer, "step", lambda _, scale: steps.append(scale))

    train_by_contrast(encoder, points, label_texts, make_stage(batch_size=8), seed=0)

    assert len(steps) == 10 * n_epochs


def texts_of_two_words():
    """Return texts that name one of their two labels."""
    rng = np.random.default_rng(0)
    pairs = [rng.permutation(6)[:2] for _ in range(60)]
    return [f"in the {WORDS[a]}" for a, b in pairs], [[WORDS[a], WORDS[b]] for a, b in pairs]


def tiny_config(folder, **settings):
    """Return the configuration of a tiny transformer that is trained in two stages."""
    short = {f"stages.{name}.epochs": 1 for name in ("stage1", "stage2")}
    return EliasConfig().override(
        {
            "encoder.model": save_tiny_bert(folder / "bert"),
            "index.kind": "graph",
            "rerank.enabled": False,
            "eval.validation_size": 12,
        }
        | short
        | settings
    )


def test_a_resumed_transformer_does_not_repeat_stage_0(tmp_path, monkeypatch):
    texts, labels = texts_of_two_words()
    config, n_trained = tiny_config(tmp_path), []

    def counted(*args):
        n_trained.append(1)
        return train_by_contrast(*args)

    def fail(*_):
        raise KeyError

    def finish(folder):
        return train(None, config, tmp_path / folder, texts=texts, labels=labels, device="cpu")

    monkeypatch.setattr(trainer, "train_by_contrast", counted)
    whole = finish("whole").model.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(StageInitializer, "init_learned_graph", fail)
        with pytest.raises(KeyError):
            finish("resumed")

    resumed = finish("resumed").model.state_dict()

    assert len(n_trained) == 2
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("compares", [True, False])
def test_stage_0_is_undone_if_it_is_worse_on_held_out_points(
    compares, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    texts, labels = texts_of_two_words()
    config = tiny_config(tmp_path, **{"eval.drop_unhelpful": compares})
    finite = []

    def spoil(encoder, *_):
        for parameter in encoder.parameters():
            parameter.data.fill_(torch.nan)
        return 1.5

    def stop(self, *_):
        finite.append(all(torch.isfinite(p).all() for p in self.encoder.parameters()))
        raise KeyError

    monkeypatch.setattr(trainer, "train_by_contrast", spoil)
    monkeypatch.setattr(trainer.Trainer, "_train_stage", stop)
    with pytest.raises(KeyError):
        train(None, config, tmp_path / "run", texts=texts, labels=labels, device="cpu")

    assert finite == [compares]
    assert ("contrastive training did not help" in caplog.text) == compares
    assert "contrastive training: loss 1.5000" in caplog.text


@pytest.mark.parametrize(
    ("with_all", "reranks", "is_used"),
    [(69.0, True, True), (62.0, True, False), (40.0, True, False), (69.0, False, False)],
)
def test_all_label_texts_count_in_centroids_if_held_out_points_say_so(
    with_all, reranks, is_used, tmp_path, monkeypatch
):
    texts, labels = texts_of_two_words()
    labels = [[other] for _, other in labels]  # a text never has the label that it names
    scores, seen = iter([50.0, 60.0, with_all]), []  # a standard error is 7.7

    def stop(self, _, position, *__):
        seen.append((self._stage(position), self.initializer))
        raise KeyError

    monkeypatch.setattr(trainer, "train_by_contrast", lambda *_: 1.5)
    monkeypatch.setattr(trainer, "labels_with_words", lambda names, _: np.arange(len(names)))
    monkeypatch.setattr(trainer.Trainer, "_score_of_centroids", lambda _: next(scores))
    monkeypatch.setattr(trainer.Trainer, "_train_stage", stop)
    settings = {"stages.stage1.first_classifiers": "random", "stages.stage1.keep_labels": False}
    config = tiny_config(tmp_path, **settings, **{"rerank.enabled": reranks})
    with pytest.raises(KeyError):
        train(None, config, tmp_path / "run", texts=texts, labels=labels, device="cpu")

    ((stage, initializer),) = seen
    n_labels = len({name for names in labels for name in names})
    n_texts = 0 if initializer.label_texts is None else len(initializer.label_texts.tokens)
    assert (n_texts == n_labels) == is_used
    n_words = 0 if initializer.label_bow is None else initializer.label_bow.shape[0]
    assert n_words == n_texts
    assert (stage.first_classifiers == "centroids") == is_used
    assert stage.keep_labels == is_used


def test_a_resumed_run_keeps_the_choice_of_label_texts(tmp_path, monkeypatch):
    texts, labels = texts_of_two_words()
    config, used = tiny_config(tmp_path, **{"rerank.enabled": True}), []
    scores = iter([50.0, 60.0, 90.0])
    init_learned_graph = StageInitializer.init_learned_graph

    def fail(*_):
        raise KeyError

    def note(self, model, partition, stage, position):
        used.append((len(self.label_texts.tokens), stage.keep_labels))
        init_learned_graph(self, model, partition, stage, position)

    def finish():
        return train(None, config, tmp_path / "run", texts=texts, labels=labels, device="cpu")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_score_of_centroids", lambda _: next(scores))
        patch.setattr(StageInitializer, "init_learned_graph", fail)
        with pytest.raises(KeyError):
            finish()
    monkeypatch.setattr(StageInitializer, "init_learned_graph", note)

    finish()

    assert used == [(4, True)]  # two labels share no word with the texts
