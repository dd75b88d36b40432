"""Labels that only held-out points have: predicted for new texts, not for the held-out ones."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias import EliasConfig
from elias.data.corpus import Corpus, Split
from elias.training.run import Run
from elias.training.trainer import Trainer

N_COMMON, N_SINGLE = 4, 60
SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "index.kind": "graph",
    "rerank.trees": 2,
    "eval.validation_size": 40,
}


def corpus():
    """Return points with common labels, and one point for each single label, named in its text."""
    rng = np.random.default_rng(0)
    common = [f"word{i % N_COMMON} is {rng.bytes(8).hex()}" for i in range(30 * N_COMMON)]
    single = [f"rare{i} thing{i} and more" for i in range(N_SINGLE)]
    columns = [*range(N_COMMON)] * 30 + [N_COMMON + i for i in range(N_SINGLE)]
    texts = common + single
    rows = np.arange(len(texts))
    shape = (len(texts), N_COMMON + N_SINGLE)
    labels = csr_matrix((np.ones(len(texts), np.float32), (rows, columns)), shape)
    names = [f"word{i}" for i in range(N_COMMON)] + [f"thing{i} rare{i}" for i in range(N_SINGLE)]
    return Corpus(train=Split(labels=labels, texts=texts), label_names=names)


class RecordingTrainer(Trainer):
    """Keeps the predictions before and after labels beside the index joined them."""

    def _join_added(self, model, name, ranked):
        joined = super()._join_added(model, name, ranked)
        self.joins = {component: (ranked[component], joined[component]) for component in ranked}
        return joined


@pytest.fixture(scope="module")
def trained():
    points = corpus()
    config = EliasConfig().override(SMALL).resolve(len(points.train), N_COMMON + N_SINGLE)
    trainer = RecordingTrainer(config, points, Run())
    return trainer, trainer.train(), points


def test_their_label_texts_are_no_training_points(trained):
    trainer, _, _ = trained

    assert trainer.is_held_out.sum() > 5
    assert trainer.is_held_out[:N_COMMON].sum() == 0
    trained_labels = trainer.points.labels.getnnz(axis=0) > 0
    assert not trained_labels[trainer.is_held_out].any()


def test_held_out_points_do_not_get_them(trained):
    trainer, model, _ = trained

    assert set(model.added.labels) == set(np.flatnonzero(trainer.is_held_out))
    assert trainer.joins
    for before, after in trainer.joins.values():
        assert (before.ids == after.ids[:, : before.ids.shape[1]]).all()


def test_new_texts_get_them(trained):
    trainer, model, points = trained
    held_out = np.flatnonzero(trainer.is_held_out)

    for label in held_out.tolist():
        name = points.label_names[label]
        assert model.predict(f"the {name} of today", top_k=5).labels.count(name) == 1


@pytest.mark.parametrize(("n_labels", "predicted"), [(9, False), (10, True)])
def test_a_few_are_not_worth_the_time(trained, monkeypatch, n_labels, predicted):
    trainer, model, _ = trained
    few = np.cumsum(trainer.is_held_out) <= n_labels
    monkeypatch.setattr(trainer, "is_held_out", trainer.is_held_out & few)

    added = trainer._labels_beside(model)

    assert (added is not None) == predicted
