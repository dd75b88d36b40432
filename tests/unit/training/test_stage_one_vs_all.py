"""Training one-vs-all: the update inside the loss, its schedule, averaging, storage, and starts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from elias.config import EliasConfig, EncoderConfig, EvalConfig
from elias.data.corpus import Corpus, Split
from elias.model.batch_inference import rank_all
from elias.model.elias import SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.one_vs_all import OneVsAll
from elias.text.batches import collate, positives_of
from elias.text.vectorizer import Featurizer
from elias.training.optimizer import Optimizer, WeightAverage
from elias.training.run import Run
from elias.training.stage import Points, StageLoop
from elias.training.trainer import Trainer
from stages import make_stage

N_LABELS, N_POINTS = 12, 60
ENCODER = {"dim": 16, "hidden_dim": 16, "char_ngrams": (0, 0)}
STAGE = make_stage(name="one-vs-all", epochs=6, batch_size=16, label_lr=0.02)
CONFIG = replace(EliasConfig().override({"index.kind": "all"}), stages=(STAGE,))


def make_corpus():
    """Texts whose words name their labels."""
    truth = np.random.default_rng(0).random((N_POINTS, N_LABELS)) < 0.25
    texts = [" ".join(f"word{label}" for label in np.flatnonzero(row)) for row in truth]
    labels = csr_matrix(truth.astype(np.float32))
    names = [f"label {i}" for i in range(N_LABELS)]
    return Corpus(train=Split(labels=labels, texts=texts), label_names=names)


def make_points():
    split = make_corpus().train
    featurizer = Featurizer.fit(split.texts, char_ngrams=(0, 0), min_count=1)
    encoder = BagEncoder(EncoderConfig(**ENCODER), featurizer, featurizer.n_features)
    return encoder, Points(encoder.tokenize(split.texts), split.labels)


def run(config, *, init_from=None, seen=None):
    torch.manual_seed(0)
    config = replace(config, encoder=EncoderConfig(**ENCODER), eval=EvalConfig(validation_size=0))
    config = config.resolve(N_POINTS, N_LABELS)
    trainer = Trainer(config, make_corpus(), Run())
    if seen is not None:
        trainer.report_stage = lambda _stage, model, _epoch: seen(model)
    trainer.prepare()
    if init_from is not None:
        trainer.encoder = trainer.initializer.encoder = init_from.encoder
    return trainer.train_stages(init_from)


def precision_at_1(model):
    _, points = make_points()
    sizes = SearchSizes(model.graph.n_clusters, model.n_labels)
    best = rank_all(model, points.tokens, sizes, 1).ids[:, 0]
    return points.labels.toarray()[np.arange(N_POINTS), best].mean()


@pytest.fixture
def model():
    encoder, _ = make_points()
    return OneVsAll(encoder.eval(), N_LABELS)


def step(model, optimizer, scale):
    _, points = make_points()
    rows = np.arange(N_POINTS)
    losses = model.all_losses(
        model.encoder(collate(points.tokens, rows)),
        positives_of(points.labels, rows),
        mean=False,
        update=optimizer.label_update(scale),
    )
    losses.total.backward()
    optimizer.step(scale)


def test_steps_through_the_optimiser_are_torchs_adamw_on_the_dense_loss(model):
    _, points = make_points()
    stage = make_stage(label_lr=0.05, label_eps=1e-3, weight_decay=0.1, bag_lr=0.0, encoder_lr=0.0)
    weight, bias = (p.detach().double().requires_grad_() for p in model.labels.parameters())
    torchs = torch.optim.AdamW(
        [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}],
        eps=1e-3,
    )
    with torch.no_grad():
        embedding = model.encoder(collate(points.tokens, np.arange(N_POINTS))).double()
    truth = torch.from_numpy(points.labels.toarray()).double()
    optimizer = Optimizer(model, stage)

    for scale in (0.5, 1.0, 0.25):
        step(model, optimizer, scale)
        for group in torchs.param_groups:
            group["lr"] = 0.05 * scale
        torchs.zero_grad()
        loss = cross_entropy(embedding @ weight.T + bias, truth, reduction="sum") / N_POINTS
        loss.backward()
        torchs.step()

    torch.testing.assert_close(model.labels.weight.double(), weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.labels.bias.double(), bias, rtol=1e-3, atol=1e-4)


def test_every_part_but_the_unused_cluster_moves(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}

    step(model, Optimizer(model, make_stage()), 1.0)

    still = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert still == {"clusters.weight", "clusters.bias", "graph.edge_logits", "graph.edge_labels"}


def test_a_learning_rate_of_zero_changes_no_label(model):
    before = model.labels.weight.detach().clone()

    step(model, Optimizer(model, make_stage()), 0.0)

    assert torch.equal(model.labels.weight, before)


@pytest.mark.parametrize("storage", ["full", "compact"])
def test_one_vs_all_learns_a_toy_problem(storage):
    dtypes = []

    model = run(
        CONFIG.override({"index.label_storage": storage, "stages.0.epochs": 40}),
        seen=lambda model: dtypes.append(model.labels.weight.dtype),
    )

    assert dtypes == [torch.bfloat16 if storage == "compact" else torch.float32]
    assert model.labels.weight.dtype == torch.float32  # ready for whatever comes after
    assert precision_at_1(model) > 0.9


def test_steps_too_small_for_bfloat16_still_add_up():
    encoder, _ = make_points()
    model = OneVsAll(encoder, 400)
    model.labels.weight.data.fill_(1.0)
    model.compact()
    optimizer = Optimizer(model, make_stage(label_lr=1e-4, weight_decay=0.0))

    for _ in range(100):  # to nearest, none of these would move a weight of 1
        optimizer.label_update(1.0)(slice(0, 400), torch.ones(400, 16), torch.ones(400))
        optimizer.step(1.0)

    assert model.labels.weight.float().mean().item() == pytest.approx(0.99, abs=0.001)


def test_three_quarters_of_a_stage_score_a_share_of_the_labels(monkeypatch):
    drawn = []
    all_losses = OneVsAll.all_losses

    def record(*args, **options):
        drawn.append(options["drawn"])
        return all_losses(*args, **options)

    monkeypatch.setattr(OneVsAll, "all_losses", record)
    shares = {}
    for label_share in (0.5, 1.0):
        drawn.clear()
        run(replace(CONFIG, stages=(replace(STAGE, label_share=label_share),)))
        shares[label_share] = [mask if mask is None else mask.float().mean() for mask in drawn]

    first, last = shares[0.5][:18], shares[0.5][18:]  # 24 steps
    assert 0.3 < sum(first) / 18 < 0.7
    assert last == [None] * 6
    assert shares[1.0] == [None] * 24


def test_an_epoch_that_samples_labels_is_not_the_best():
    stage = replace(STAGE, label_share=0.5)
    epochs = []
    loop = None

    def validate(_):
        return {"nDCG@5": 10.0 - loop._optimizer.steps}  # the first epoch would be the best

    encoder, points = make_points()
    config = replace(CONFIG, stages=(stage,), eval=EvalConfig(patience=1))
    config = config.resolve(N_POINTS, N_LABELS)
    loop = StageLoop(
        model=OneVsAll(encoder, N_LABELS),
        stage=config.stages[0],
        config=config,
        points=points,
        rng=np.random.default_rng(0),
        validate=validate,
        report=lambda report: epochs.append(report.epoch),
    )

    best = loop.run()

    assert best == 5  # the first whose last step scores all labels
    assert epochs == [1, 2, 3, 4, 5, 6]  # patience does not count earlier epochs


def test_classifiers_start_at_centroids_with_biases_at_the_prior():
    still = replace(STAGE, epochs=1, label_lr=0.0, encoder_lr=0.0, bag_lr=0.0)
    _, points = make_points()
    per_point = points.labels.nnz / N_POINTS

    centroids = run(replace(CONFIG, stages=(still,)))
    random = run(replace(CONFIG, stages=(replace(still, first_classifiers="random"),)))

    assert precision_at_1(centroids) > 0.6 > precision_at_1(random)
    prior = np.log(per_point / N_LABELS)
    assert random.labels.bias.tolist() == pytest.approx([prior] * N_LABELS, rel=1e-5)


def test_weights_in_bfloat16_are_averaged_in_float32(model):
    model.compact()
    average = WeightAverage(model)
    for value in (1.0, 1.0078125, 1.0):  # neighbours in bfloat16: the mean lies between them
        model.labels.weight.data.fill_(value)
        average.update()

    mean = average._mean["labels.weight"]
    average.swap()

    assert mean.dtype == torch.float32
    assert mean[0, 0].item() == pytest.approx(1 + 0.0078125 / 3)
    assert model.labels.weight.dtype == torch.bfloat16


def test_a_run_is_repeatable_bit_for_bit():
    config = CONFIG.override({"index.label_storage": "compact"})

    first, again = (run(config).state_dict() for _ in range(2))

    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_training_can_continue_from_one_vs_all_to_a_graph_and_back():
    graph = EliasConfig().override({"index.n_clusters": 3, "stages.stage1.epochs": 2})
    graph = replace(graph, stages=graph.stages[:1])
    first = run(CONFIG.override({"index.label_storage": "compact"}))

    searched = run(graph, init_from=first)
    again = run(CONFIG, init_from=searched)

    assert not isinstance(searched, OneVsAll)
    assert searched.graph.n_clusters == 3
    assert isinstance(again, OneVsAll)
    assert precision_at_1(again) > 0.9
