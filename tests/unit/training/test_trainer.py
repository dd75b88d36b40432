from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, EncoderConfig, EvalConfig, IndexConfig
from elias.data.corpus import Corpus, Split
from elias.training.run import Run
from elias.training.trainer import Trainer
from stages import make_stage

N_LABELS = 12
INDEX = IndexConfig(
    n_clusters=4,
    edges_per_cluster=5,
    beam_size=2,
    shortlist_size=6,
    train_shortlist=6,
    beta=3.0,
    alpha=2.0,
)
CLUSTER, FIXED, LEARNED = (
    make_stage(name="clusters", epochs=1, batch_size=8),
    make_stage(name="stage1", epochs=1, batch_size=8, cluster_with_encoder=True),
    make_stage(name="stage2", epochs=2, batch_size=8, learn_graph=True),
)


def run(stages, seen=None, *, index=INDEX, init_from=None):
    """Train on 40 texts whose words name their labels; label 11 has no point."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    truth = rng.random((40, N_LABELS)) < 0.2
    truth[:, 11] = False
    texts = [" ".join(f"word{label}" for label in np.flatnonzero(row)) for row in truth]
    encoder = EncoderConfig(dim=8, hidden_dim=8, char_ngrams=(0, 0))
    config = EliasConfig(
        index=index, stages=stages, encoder=encoder, eval=EvalConfig(validation_size=0)
    )
    corpus = Corpus(
        train=Split(labels=csr_matrix(truth.astype(np.float32)), texts=texts),
        label_names=[f"label {i}" for i in range(N_LABELS)],
    )
    trainer = ReportingTrainer(config.resolve(len(texts), N_LABELS), corpus, Run())
    trainer.seen = seen
    trainer.prepare()
    return trainer.train_stages(init_from)


class ReportingTrainer(Trainer):
    """Hands every trained stage to a test."""

    def report_stage(self, stage, model, best_epoch):
        super().report_stage(stage, model, best_epoch)
        if self.seen is not None:
            self.seen(stage, model)


def test_the_first_stage_trains_on_a_partition_and_the_second_learns_the_graph():
    graphs = {}

    run((FIXED, LEARNED), lambda stage, model: graphs.update({stage.name: model.graph}))

    assert not graphs["stage1"].learned
    assert sorted(graphs["stage1"].edge_labels.flatten().tolist()) == list(range(N_LABELS))
    assert graphs["stage2"].learned
    assert graphs["stage2"].edge_labels.shape == (4, 5)


def test_every_label_can_be_reached_after_all_stages():
    model = run((CLUSTER, FIXED, LEARNED))

    assert (model.graph.strongest_parents() < 4).all()


def test_a_run_is_repeatable_bit_for_bit():
    first, again = (run((CLUSTER, FIXED, LEARNED)).state_dict() for _ in range(2))

    assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two cores")
def test_the_number_of_threads_of_the_kernels_does_not_change_the_model():
    before = numba.get_num_threads()
    models = []
    for threads in (1, 2):
        numba.set_num_threads(threads)
        models.append(run((CLUSTER, FIXED, LEARNED)).state_dict())
    numba.set_num_threads(before)

    one, two = models
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("keep", [True, False])
def test_label_classifiers_are_kept_only_with_keep_labels(keep):
    still = {"label_lr": 0.0, "weight_decay": 0.0}
    stages = (
        make_stage(name="stage1", epochs=1, **still),
        make_stage(name="stage2", epochs=1, learn_graph=True, keep_labels=keep, **still),
    )
    weights = {}

    run(stages, lambda s, model: weights.update({s.name: model.labels.weight.detach().clone()}))

    assert torch.equal(weights["stage1"], weights["stage2"]) is keep


def test_settings_that_a_stage_which_learns_the_graph_ignores_are_named(caplog):
    learned = replace(LEARNED, keep_encoder=False, cluster_with_encoder=True)

    run((FIXED, learned))

    (warning,) = (line for line in caplog.messages if "no effect" in line)
    assert warning.startswith("stages.stage2.keep_encoder, stages.stage2.cluster_with_encoder: ")


def test_settings_that_every_stage_uses_give_no_warning(caplog):
    run((CLUSTER, replace(FIXED, keep_encoder=False), LEARNED))

    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("start", "changes", "named"),
    [
        ((FIXED, LEARNED), {}, None),
        ((FIXED, LEARNED), {"beta": 4.0}, "index.beta: this has no effect"),
        (
            (FIXED, LEARNED),
            {"n_clusters": 3, "edges_per_cluster": 4, "alpha": 3.0},
            "index.alpha, index.n_clusters, index.edges_per_cluster: this has no effect",
        ),
        (
            (FIXED,),
            {"alpha": 3.0, "beta": 4.0, "edges_per_cluster": 4},
            "index.alpha: this has no effect",
        ),
    ],
)
def test_settings_of_the_index_that_a_model_to_start_from_overrules_are_named(
    caplog, start, changes, named
):
    first = run(start)

    run((LEARNED,), index=replace(INDEX, **changes), init_from=first)

    warnings = [line for line in caplog.messages if "no effect" in line]
    assert len(warnings) == (named is not None)
    assert all(line.startswith(named) for line in warnings)
