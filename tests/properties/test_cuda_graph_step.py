"""A stage whose steps are recorded trains the model of one whose steps are not."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from elias.config import EliasConfig, EncoderConfig, IndexConfig, LossConfig
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph
from elias.model.transformer import TransformerEncoder
from stages import make_stage
from tiny_bert import save_tiny_bert

# the interpreter of older versions fails with numpy 2.4
pytest.importorskip("triton", minversion="3.7", reason="Triton is not installed, or too old")

from elias.kernels import IndexGradients
from elias.training import cuda_graph_step, optimizer
from elias.training.cuda_graph_step import CudaGraphStep
from elias.training.stage import Points, StageLoop

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TEXTS = [
    "red cod",
    "her in the north sea",
    "tape",
    "the quota in the sea",
    "red",
    "cod in the tape",
]
TEXTS += ["north sea north sea red cod her in", "sea", "in the"]
N_LABELS = 8
INDEX = IndexConfig(
    n_clusters=4,
    edges_per_cluster=5,
    beam_size=3,
    shortlist_size=6,
    train_shortlist=6,
    beta=2.0,
    alpha=1.5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")


def make_model(folder):
    config = EncoderConfig(model=folder, max_length=12, dropout=0.0)
    torch.manual_seed(2)
    edges = torch.stack([torch.randperm(N_LABELS)[:5] for _ in range(4)])
    graph = LabelGraph(edges, N_LABELS, 2.0, edge_logits=torch.randn(4, 5))
    return EliasModel(TransformerEncoder.from_config(config), graph, alpha=1.5)


def train(model, stage, reduction, monkeypatch, record):
    recordings = []

    def recorder(_device):
        return lambda work: recordings.append(1) or record(work)

    monkeypatch.setattr(optimizer, "runs_triton", lambda _: True)
    monkeypatch.setattr(cuda_graph_step, "GraphRecorder", recorder)
    labels = np.random.default_rng(0).random((len(TEXTS), N_LABELS)) < 0.25
    labels[:, 0] = True  # rows of one to three positives, fewer than the beam
    reports = []
    config = EliasConfig(index=INDEX, loss=LossConfig(reduction=reduction), stages=(stage,))
    loop = StageLoop(
        model=model,
        stage=stage,
        config=config.resolve(len(TEXTS), N_LABELS),
        points=Points(model.encoder.tokenize(TEXTS), csr_matrix(labels)),
        rng=np.random.default_rng(1),
        validate=None,
        report=reports.append,
    )
    loop.run()
    return [report.loss for report in reports], len(recordings)


def rerun(work):
    """Stand in for a CUDA graph: do the work again, and leave the results in the same memory."""
    work()
    actual = work()

    def replay():
        for one, other in zip(*((of.losses, *of.pairs) for of in (actual, work())), strict=True):
            one.copy_(other)

    return replay, actual


@pytest.mark.parametrize(("reduction", "index_every"), [("mean", 1), ("sum", 3)])
def test_a_recorded_stage_trains_the_same_model(folder, reduction, index_every, monkeypatch):
    stage = make_stage(
        epochs=2,
        batch_size=2,
        learn_graph=True,
        index_every=index_every,
        average_from=0.5,
        label_eps=1e-4,
    )
    model = make_model(folder)
    plain = copy.deepcopy(model)
    plain.encoder.capturable = False

    expected, none = train(plain, stage, reduction, monkeypatch, rerun)
    losses, recorded = train(model, stage, reduction, monkeypatch, rerun)

    assert none == 0
    assert recorded > 0
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("key.bias"):
            continue  # attention does not depend on it, so it follows rounding
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: n + m)


def test_a_failed_capture_leaves_no_gradients(folder, monkeypatch):
    stage = make_stage(epochs=2, batch_size=2, learn_graph=True, index_every=2, label_eps=1e-4)
    model = make_model(folder)
    plain = copy.deepcopy(model)
    plain.encoder.capturable = False
    taken = IndexGradients.take_last_pairs

    def broken(work):
        with monkeypatch.context() as patch:  # the pairs of a backward pass are noted by then
            patch.setattr(IndexGradients, "take_last_pairs", lambda _: 1 / 0)
            return work()

    expected, _ = train(plain, stage, "sum", monkeypatch, rerun)
    losses, recorded = train(model, stage, "sum", monkeypatch, broken)

    assert recorded == 1
    assert IndexGradients.take_last_pairs is taken
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_a_step_that_runs_out_of_memory_is_repeated_without_graphs(folder, monkeypatch, caplog):
    stage = make_stage(epochs=3, batch_size=2, learn_graph=True, index_every=2, label_eps=1e-4)
    model = make_model(folder)
    plain = copy.deepcopy(model)
    plain.encoder.capturable = False
    whole, failed = CudaGraphStep._run_eagerly, []

    def none_left(_):
        failed.append(1)
        raise torch.OutOfMemoryError("the graphs have it all")

    def short(*args, **options):
        with monkeypatch.context() as patch:  # gradients are summed by then
            patch.setattr(IndexGradients, "take_last_pairs", none_left)
            return whole(*args, **options)

    monkeypatch.setattr(CudaGraphStep, "_run_eagerly", short)
    expected, _ = train(plain, stage, "sum", monkeypatch, rerun)
    losses, recorded = train(model, stage, "sum", monkeypatch, rerun)

    assert recorded > 0
    assert len(failed) == 1
    assert "continuing without them" in caplog.text
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    edges, theirs = model.graph.edge_logits, plain.graph.edge_logits
    torch.testing.assert_close(edges, theirs, rtol=1e-3, atol=1e-4)


def test_parameters_without_a_part_in_the_loss_do_not_move(folder, monkeypatch):
    stage = make_stage(epochs=2, batch_size=2, learn_graph=True, weight_decay=0.1)
    model = make_model(folder)
    model.encoder.idle = torch.nn.Parameter(torch.ones(2, 2))

    _, recorded = train(model, replace(stage), "sum", monkeypatch, rerun)

    assert recorded > 0
    assert torch.equal(model.encoder.idle, torch.ones(2, 2))


def test_a_stage_frees_the_memory_of_its_graphs(folder, monkeypatch):
    closed = []
    monkeypatch.setattr(CudaGraphStep, "close", lambda self: closed.append(self))

    train(make_model(folder), make_stage(epochs=1, batch_size=2), "sum", monkeypatch, rerun)

    assert len(closed) == 1
