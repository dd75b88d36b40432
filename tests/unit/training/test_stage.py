from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, EncoderConfig, EvalConfig, IndexConfig
from elias.distributed import SingleProcess
from elias.errors import RunError
from elias.model.elias import EliasModel
from elias.model.encoder import BagEncoder
from elias.model.graph import LabelGraph, partition_edges
from elias.model.one_vs_all import OneVsAll
from elias.text.vectorizer import Featurizer
from elias.training.checkpoint import Checkpoint
from elias.training.label_texts import LabelPoints
from elias.training.optimizer import schedule
from elias.training.stage import Points, StageLoop, first_non_finite, torch_on_one_thread
from stages import make_stage

N_LABELS = 6
TEXTS = [f"{word} {other}" for word in ("cod", "tape", "ship") for other in ("red", "blue", "old")]
STAGE = make_stage(epochs=6, batch_size=4, cluster_lr=0.05, label_lr=0.05)
CONFIG = EliasConfig(
    index=IndexConfig(
        n_clusters=3,
        edges_per_cluster=4,
        beam_size=2,
        shortlist_size=4,
        train_shortlist=4,
        beta=2.0,
        alpha=1.5,
    ),
    stages=(STAGE,),
)


def make_model(learned=True):
    """A model over words; its weights follow torch's seed."""
    featurizer = Featurizer.fit(TEXTS, char_ngrams=(0, 0), min_count=1)
    config = EncoderConfig(dim=8, hidden_dim=8, dropout=0.1, token_dropout=0.1)
    edges = partition_edges(torch.arange(N_LABELS) % 3, 3)
    logits = torch.rand(edges.shape) if learned else None
    graph = LabelGraph(edges, N_LABELS, 2.0, edge_logits=logits)
    return EliasModel(BagEncoder(config, featurizer, featurizer.n_features), graph, alpha=1.5)


def make_loop(model, reports=None, *, validate=None, stage=STAGE, patience=0):
    rng = np.random.default_rng(0)
    labels = np.zeros((len(TEXTS), N_LABELS))
    labels[np.arange(len(TEXTS)), np.arange(len(TEXTS)) // 3] = 1  # the first word decides
    labels[:, 3:] = rng.random((len(TEXTS), 3)) < 0.2
    evaluation = EvalConfig(select_by="P@1", patience=patience)
    return StageLoop(
        model=model,
        stage=stage,
        config=replace(CONFIG, eval=evaluation).resolve(len(TEXTS), N_LABELS),
        points=Points(model.encoder.tokenize(TEXTS), csr_matrix(labels)),
        rng=np.random.default_rng(1),
        validate=validate,
        report=(lambda _: None) if reports is None else reports.append,
    )


def scripted(scores, seen=None):
    """A validation that answers with the given scores, one after the other."""
    remaining = iter(scores)

    def validate(model):
        if seen is not None:
            seen.append(model.labels.weight.detach().clone())
        return {"P@1": float(next(remaining))}

    return validate


@pytest.mark.parametrize("learned", [True, False])
def test_training_lowers_the_loss(learned):
    reports = []

    make_loop(make_model(learned), reports, stage=replace(STAGE, epochs=40)).run()

    assert [report.epoch for report in reports] == list(range(1, 41))
    assert reports[-1].loss < 0.7 * reports[0].loss


def test_one_seed_gives_bit_identical_weights():
    def train():
        torch.manual_seed(3)
        model = make_model()
        make_loop(model).run()
        return model.state_dict()

    first, again = train(), train()

    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_the_loss_reported_is_made_of_its_parts():
    reports = []

    make_loop(make_model(), reports).run()

    for report in reports:
        parts = report.classification_loss + STAGE.shortlist_loss_weight * report.shortlist_loss
        assert report.loss == pytest.approx(parts, rel=1e-5)


def test_the_best_epochs_weights_are_kept():
    seen = []
    model = make_model()

    best = make_loop(model, validate=scripted([1, 5, 4, 3, 2, 0], seen)).run()

    assert best == 2
    assert torch.equal(model.labels.weight, seen[1])


def test_a_stage_stops_when_validation_no_longer_improves(caplog):
    caplog.set_level("INFO", "elias")
    reports = []

    best = make_loop(make_model(), reports, validate=scripted([1, 5, 4, 3, 2, 0]), patience=2).run()

    assert best == 2
    assert len(reports) == 4
    assert "no improvement for 2 epochs, stopping" in caplog.text


def test_a_stage_does_not_say_that_it_stops_after_its_last_epoch(caplog):
    caplog.set_level("INFO", "elias")
    scores = [5, *range(STAGE.epochs - 1)]

    make_loop(make_model(), validate=scripted(scores), patience=STAGE.epochs - 1).run()

    assert "stopping" not in caplog.text


def test_validation_uses_the_averaged_weights_and_training_the_current_ones():
    seen_averaged, seen_plain = [], []
    for seen, average_from in ((seen_averaged, 0.5), (seen_plain, 1.0)):
        torch.manual_seed(0)
        stage = replace(STAGE, average_from=average_from)
        make_loop(make_model(), stage=stage, validate=scripted([0] * 6, seen)).run()

    assert all(torch.equal(seen_averaged[i], seen_plain[i]) for i in range(3))
    assert not torch.equal(seen_averaged[-1], seen_plain[-1])


def test_without_validation_the_last_epochs_weights_stay():
    assert make_loop(make_model()).run() == STAGE.epochs


def test_a_resumed_stage_keeps_its_best_epoch():
    checkpoints = {}

    def keep(where, make):
        metadata, tensors = make()
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        checkpoints[where] = Checkpoint(metadata, copies)

    whole = make_loop(make_model(), validate=scripted([1, 5, 2, 2, 2, 2], []))
    whole.keep = keep
    rest = make_loop(make_model(), validate=scripted([2, 2, 2], []))

    best_epoch = whole.run()
    rest.resumed = checkpoints["stage1 epoch 4 step 0"]

    assert best_epoch == rest.run() == 2
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], weight), name


def test_a_stage_resumed_within_an_epoch_draws_the_same_label_texts():
    def loop():
        model = make_model()
        loop = make_loop(model)
        tokens = model.encoder.tokenize(["red cod", "tape", "old ship", "blue"])
        targets = csr_matrix(np.random.default_rng(0).random((4, N_LABELS)).astype(np.float32))
        loop.label_points = LabelPoints(tokens, targets, np.full(4, 0.75))
        return loop

    steps, whole, rest = {}, loop(), loop()

    def keep(where, make):
        metadata, tensors = make()
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        weights = {n: t.detach().clone() for n, t in whole.model.state_dict().items()}
        steps[where] = Checkpoint(metadata, tensors), weights, torch.get_rng_state()

    whole.keep = keep
    whole.run()
    assert "stage1 epoch 2 step 3" in steps  # 9 points and 3 label texts in batches of 4
    rest.resumed, weights, random_state = steps["stage1 epoch 2 step 1"]
    rest.model.load_state_dict(weights)
    torch.set_rng_state(random_state)
    rest.run()

    for name, weight in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], weight), name


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("average_from", [0.5, 1.0])
def test_a_label_that_no_step_touches_decays_with_the_schedule(validated, average_from):
    model, seen, stage = make_model(), [], replace(STAGE, average_from=average_from)
    stage = replace(stage, weight_decay=2.0)
    edges = torch.tensor([[0, 3], [1, 4], [2, N_LABELS]])  # none leads to label 5
    model.graph = LabelGraph(edges, N_LABELS, 2.0, edge_logits=torch.rand(edges.shape))
    loop = make_loop(model, validate=scripted(range(6), seen) if validated else None, stage=stage)
    labels = loop.points.labels.toarray()
    labels[:, 5] = 0
    loop.points = loop.points._replace(labels=csr_matrix(labels))
    start = model.labels.weight.detach()[5].clone()

    loop.run()

    n_steps = 3 * stage.epochs
    factors = [1 - 2.0 * 0.05 * schedule(step, n_steps) for step in range(n_steps)]
    decayed = np.cumprod(factors)  # with three steps an epoch, the average takes all of them in
    first = int(average_from * n_steps)
    expected = decayed[-1] if average_from == 1 else decayed[first:].mean()
    torch.testing.assert_close(model.labels.weight.detach()[5], float(expected) * start)
    if validated and average_from == 1:
        for epoch, weight in enumerate(seen, start=1):
            torch.testing.assert_close(weight[5], float(decayed[3 * epoch - 1]) * start)


@pytest.mark.parametrize("part", ["labels", "clusters", "encoder.norm"])
@pytest.mark.parametrize("kind", ["graph", "one-vs-all"])
def test_weights_that_are_not_finite_stop_the_run_in_the_first_epoch(part, kind):
    model = make_model()
    if kind == "one-vs-all":
        model = OneVsAll(model.encoder, N_LABELS)
    model.get_submodule(part).weight.data.fill_(float("nan"))
    reports = []

    with pytest.raises(RunError, match="stage1 epoch 1 step "):
        make_loop(model, reports).run()

    assert reports == []


@pytest.mark.parametrize("key", ["bag_lr", "encoder_lr", "cluster_lr"])
def test_a_run_that_diverges_names_the_learning_rate_to_lower(key):
    stage = replace(STAGE, **{key: 1e30}, epochs=20)

    with pytest.raises(RunError, match=rf"lower stages\.stage1\.{key} \(now 1e\+30\)"):
        make_loop(make_model(), stage=stage).run()


def test_the_learning_rate_to_lower_is_one_that_the_stage_uses():
    stage = replace(STAGE, edge_lr=1e30, encoder_lr=1e-4, bag_lr=1e-4, label_lr=1e-4)
    model = make_model(learned=False)
    model.labels.weight.data.fill_(float("nan"))

    with pytest.raises(RunError, match=r"lower stages\.stage1\.cluster_lr \(now 0\.05\)"):
        make_loop(model, stage=stage).run()


def test_learning_rates_are_compared_with_the_defaults_of_the_same_task():
    """0.001 is low for W_L in a first stage, and high after a stage that scores every label."""
    first = make_stage(name="stage1", score_all=True)
    rates = {"encoder_lr": 5e-5, "bag_lr": 1e-3, "cluster_lr": 5e-3, "label_lr": 1e-3}
    second = make_stage(name="stage2", learn_graph=True, **rates)
    loop = make_loop(make_model(), stage=second)
    loop.config = replace(CONFIG, stages=(first, second)).resolve(len(TEXTS), N_LABELS)
    loop.model.labels.weight.data.fill_(float("nan"))

    with pytest.raises(RunError, match=r"lower stages\.stage2\.label_lr"):
        loop.run()


def test_a_point_whose_token_weight_is_not_finite_is_named():
    loop = make_loop(make_model())
    tokens = loop.points.tokens
    weights = tokens.weights.copy()
    weights[tokens.offsets[5]] = float("nan")
    loop.points = loop.points._replace(tokens=replace(tokens, weights=weights))

    with pytest.raises(RunError, match=r"training points 5 .*input features contain NaN or inf"):
        loop.run()


def spoil_unreached_label(model):
    """Spoil the classifier of a label that no edge leads to: no loss shows it."""
    edges = torch.tensor([[0, 3], [1, 4], [2, N_LABELS]])
    model.graph = LabelGraph(edges, N_LABELS, 2.0, edge_logits=torch.rand(edges.shape))
    model.labels.weight.data[5, 0] = float("inf")


def test_a_weight_that_no_loss_shows_stops_the_run_before_validation():
    model, seen = make_model(), []
    spoil_unreached_label(model)

    with pytest.raises(RunError, match=r"stage1 epoch 1 step 3: labels\.weight is not finite; "):
        make_loop(model, validate=scripted(range(6), seen)).run()

    assert seen == []


def test_no_checkpoint_is_made_of_weights_that_are_not_finite():
    model, made = make_model(), []
    spoil_unreached_label(model)
    loop = make_loop(model)
    loop.keep = lambda _, make: made.append(make())

    with pytest.raises(RunError, match=r"stage1 epoch 1 step 1: labels\.weight is not finite; "):
        loop.run()

    assert made == []


class OtherProcess(SingleProcess):
    """Another process that finds what it finds."""

    def __init__(self, found):
        self.found = found

    def max_async(self, values):
        return lambda: [max(pair) for pair in zip(values, [self.found], strict=True)]


def test_processes_agree_on_the_weight_that_is_not_finite():
    model = make_model()
    names = list(model.state_dict())

    assert first_non_finite(model, OtherProcess(0)) == ""
    assert first_non_finite(model, OtherProcess(len(names))) == names[-1]
    model.labels.weight.data[0] = float("nan")
    assert first_non_finite(model, OtherProcess(0)) == "labels.weight"


def test_torch_uses_one_thread_where_numba_does_most_of_the_work():
    model = make_model()
    before = torch.get_num_threads()

    with torch_on_one_thread(model):
        of_bag = torch.get_num_threads()
    model.encoder.uses_numba = False
    with torch_on_one_thread(model):
        of_transformer = torch.get_num_threads()

    assert of_bag == 1
    assert of_transformer == torch.get_num_threads() == before
