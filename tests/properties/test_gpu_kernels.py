"""The Triton kernels, run by Triton's interpreter, compute what the slow versions compute."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from elias.kernels import Expansion, IndexGradients, label_logits, path_log, plain, shortlist_bce
from elias.kernels.adamw_state import AdamWRates, History, LinearState, RowState
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import TextEncoder
from elias.model.graph import LabelGraph
from elias.text.batches import TokenBatch
from stages import make_stage

# the interpreter of older versions fails with numpy 2.4
pytest.importorskip("triton", minversion="3.7", reason="Triton is not installed, or too old")

from elias.kernels.gpu import adamw as gpu_adamw
from elias.kernels.gpu import attention as gpu_attention
from elias.kernels.gpu import loss as gpu_loss
from elias.kernels.gpu import paths as gpu_paths
from elias.kernels.gpu import rows as gpu_rows
from elias.kernels.gpu import search as gpu_search
from elias.training import optimizer as optim
from elias.training.cuda_graph_step import CudaGraphStep
from elias.training.optimizer import Optimizer

# the interpreter is numpy, which warns of the infinities that are meant here
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
FEW = settings(max_examples=15)
SEEDS = st.integers(0, 2**31)


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def integers(generator, high, *shape):
    return torch.randint(0, high, shape, generator=generator)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


@FEW
@given(
    shape=st.tuples(*[st.integers(1, 6)] * 4),
    n_labels=st.sampled_from([1, 3, 12, 300]),
    n_wanted=st.integers(0, 4),
    shortlist_size=st.integers(1, 14),
    levels=st.sampled_from([1, 3, 10**6]),
    cut=st.tuples(
        st.sampled_from([(8, 1, 0), (8, 2, 4), (16, 2, 1), (64, 8, 16), (64, 8, None)]),
        st.sampled_from([None, torch.int32]),  # None: 16 bits, as there are few paths
    ),
    seed=SEEDS,
)
def test_the_expansion_is_that_of_plain_torch(
    shape, n_labels, n_wanted, shortlist_size, levels, cut, seed
):
    generator = generator_of(seed)
    n_points, n_clusters, n_edges, n_beam = shape
    (block, n_programs, n_listed), entry = cut

    def scores(*shape):  # from -1 or less to 1: saturated and not, with ties
        return 1 - 2 * integers(generator, levels, *shape) / min(levels, 16)

    edge_labels = integers(generator, n_labels + 1, n_clusters, n_edges)
    edge_log = scores(n_clusters, n_edges).masked_fill(edge_labels == n_labels, -torch.inf)
    beam = integers(generator, n_clusters + 1, n_points, n_beam)
    wanted = integers(generator, n_labels + 1, n_points, n_wanted).sort(dim=1).values
    given_ = (beam, scores(n_points, n_beam), edge_labels, edge_log, wanted)

    labels, paths, wanted_paths = gpu_search.expand_beam(
        *given_,
        n_labels,
        shortlist_size,
        block=block,
        n_programs=n_programs,
        n_listed=n_listed,
        entry=entry,
    )

    expected = Expansion(*plain.expand_beam(*given_, n_labels, shortlist_size))
    actual = (labels * n_beam * n_edges + paths).sort(dim=1).values
    assert torch.equal(
        actual, (expected.labels * n_beam * n_edges + expected.paths).sort(dim=1).values
    )
    assert torch.equal(wanted_paths, expected.wanted_paths)


def pairs_problem(seed, n_points, n_rows, n_labels, dim):
    generator = generator_of(seed)
    return (
        normal(generator, n_points, dim),
        normal(generator, n_rows, dim),
        normal(generator, n_rows),
        integers(generator, n_rows + 1, n_points, n_labels),
        normal(generator, n_points, n_labels),
    )


def dense_logits(embedding, weight, bias, labels):
    table = torch.cat([embedding @ weight.T + bias, embedding.new_zeros(len(embedding), 1)], dim=1)
    return table.gather(1, labels)


SIZES = {
    "n_points": st.integers(1, 5),
    "n_rows": st.integers(1, 9),
    "n_labels": st.integers(1, 20),
    "dim": st.sampled_from([1, 5, 32, 300]),
    "seed": SEEDS,
}


@FEW
@given(**SIZES)
def test_logits_and_all_gradients_are_those_of_the_dense_product(**sizes):
    *given_, labels, upstream = pairs_problem(**sizes)
    given_ = [part.requires_grad_() for part in given_]
    twins = [part.detach().double().requires_grad_() for part in given_]
    held = IndexGradients(None)

    logits = label_logits(*given_, labels, held)
    (logits * upstream).sum().backward()
    selected, coefficients, vectors = held.take_pairs()

    expected = dense_logits(*twins, labels)
    (expected * upstream).sum().backward()
    by_point = torch.zeros(len(selected), sizes["n_rows"] + 1).scatter_add(
        1, selected, coefficients
    )
    by_weight, by_bias = by_point[:, :-1].T @ vectors, by_point[:, :-1].sum(dim=0)
    actual = [logits.detach(), given_[0].grad, by_weight, by_bias]
    for one, other in zip(actual, [expected.detach(), *(t.grad for t in twins)], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    assert given_[1].grad is None


@FEW
@given(
    n_points=st.integers(1, 4),
    n_keep=st.integers(1, 12),
    n_positives=st.integers(1, 6),
    scale=st.sampled_from([1.0, 10.0, 200.0]),
    seed=SEEDS,
)
def test_the_fused_loss_is_the_plain_one(n_points, n_keep, n_positives, scale, seed):
    generator, n_labels = generator_of(seed), 15
    rows = [torch.randperm(n_labels, generator=generator) for _ in range(2 * n_points)]
    labels = torch.stack([row[:n_keep] for row in rows[:n_points]])
    positives = torch.stack([row[:n_positives] for row in rows[n_points:]])
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = n_labels
    positives[torch.rand(positives.shape, generator=generator) < 0.3] = n_labels
    positives = positives.sort(dim=1).values
    logits = normal(generator, n_points, n_keep) * scale
    logs = -normal(generator, n_points, n_keep).abs() * scale
    logs[torch.rand(logs.shape, generator=generator) < 0.3] = 0.0
    logs[torch.rand(logs.shape, generator=generator) < 0.1] = -1e-7
    slow = [part.clone().requires_grad_() for part in (logits, logs)]

    loss, *gradients = gpu_loss.shortlist_bce(logits, logs, labels, positives, n_labels)

    expected = shortlist_bce(*slow, labels, positives, n_labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, slow, strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)


RATES = AdamWRates(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.1)
LRS = [0.15, 0.3, 0.2, 0.1, 0.05]  # up, then down


def label_state(weight, bias, *, one_variance):
    width = 1 if one_variance else weight.shape[1]
    return LinearState(
        torch.zeros_like(weight),
        torch.zeros(len(weight), width),
        torch.zeros_like(bias),
        torch.zeros_like(bias),
        torch.zeros(len(bias), dtype=torch.int32),
    )


@FEW
@given(n_steps=st.integers(1, 5), dim=st.sampled_from([1, 3, 40]), seed=SEEDS)
def test_rows_updated_by_pairs_get_the_decay_of_skipped_steps(n_steps, dim, seed):
    generator, n_rows = generator_of(seed), 6
    weight, bias = normal(generator, n_rows, dim), normal(generator, n_rows)
    first = (weight.double(), bias.double().unsqueeze(1))
    state = label_state(weight, bias, one_variance=False)
    steps, history = [], History()
    for lr in LRS[:n_steps]:
        ids = integers(generator, n_rows + 1, 2, 7)
        coefficients, vectors = normal(generator, 2, 7), normal(generator, 2, dim)
        pairs = gpu_rows.pair_rows(ids, coefficients, vectors)
        history.add(RATES._replace(lr=lr))
        gpu_adamw.adamw_pairs(weight, bias, state, pairs, history)
        steps.append(row_gradients(ids, coefficients.double(), vectors.double(), n_rows))

    for row in range(n_rows):
        last = max((i for i, (by_row, _) in enumerate(steps, 1) if row in by_row), default=0)
        for i, (actual, decay) in enumerate(((weight, 0.1), (bias.unsqueeze(1), 0.0))):
            seen = [both[i] for both in steps[:last]]
            rest = LRS[:last], (0.9, 0.99), 1e-8, decay
            expected = reference.adamw(first[i], seen, *rest)[row]
            torch.testing.assert_close(actual[row].double(), expected, rtol=1e-4, atol=1e-5)
        assert state.last_step[row] == last


def row_gradients(ids, coefficients, vectors, n_rows):
    """{row: Σ coefficient·vector} and {row: Σ coefficient}."""
    by_row, sums = {}, {}
    for point in range(len(ids)):
        for row, coefficient in zip(ids[point].tolist(), coefficients[point], strict=True):
            if row < n_rows:
                by_row[row] = by_row.get(row, 0) + coefficient * vectors[point]
                sums[row] = sums.get(row, 0) + coefficient.reshape(1)
    return by_row, sums


@FEW
@given(n_steps=st.integers(1, 4), seed=SEEDS)
def test_compact_rows_keep_one_second_moment_and_stay_within_their_last_digit(n_steps, seed):
    generator, n_rows, dim = generator_of(seed), 4, 6
    weight, bias = normal(generator, n_rows, dim).bfloat16(), torch.zeros(n_rows)
    twin = weight.double()
    mean, variance = torch.zeros(n_rows, dim).double(), torch.zeros(n_rows, 1).double()
    state = label_state(weight, bias, one_variance=True)
    every_row = torch.arange(n_rows).repeat(3, 1)
    history = History()

    for step, lr in enumerate(LRS[:n_steps], start=1):
        coefficients, vectors = normal(generator, 3, n_rows), normal(generator, 3, dim)
        pairs = gpu_rows.pair_rows(every_row, coefficients, vectors)
        history.add(RATES._replace(lr=lr))
        gpu_adamw.adamw_pairs(weight, bias, state, pairs, history)
        gradient = coefficients.double().T @ vectors.double()
        mean = 0.9 * mean + 0.1 * gradient
        variance = 0.99 * variance + 0.01 * (gradient**2).mean(dim=1, keepdim=True)
        size = (variance / (1 - 0.99**step)).sqrt() + 1e-8
        twin = twin * (1 - lr * 0.1) - lr * (mean / (1 - 0.9**step)) / size

    torch.testing.assert_close(state.variance.double(), variance, rtol=1e-4, atol=1e-6)
    largest = max(1.0, twin.abs().max().item())
    torch.testing.assert_close(weight.double(), twin, rtol=0, atol=n_steps * largest / 64)


def test_rounding_a_compact_weight_is_right_on_average():
    n_rows, value = 64, 1.0 + 1 / 1000
    weight, bias = torch.ones(n_rows, 64).bfloat16(), torch.zeros(n_rows)
    state = label_state(weight, bias, one_variance=True)
    history = History()
    history.add(AdamWRates(lr=1 - value, beta1=0.0, beta2=0.0, eps=0.0, decay=0.0))
    pairs = gpu_rows.pair_rows(torch.arange(n_rows).view(1, -1), *ones(n_rows))

    gpu_adamw.adamw_pairs(weight, bias, state, pairs, history)

    spread = 2.0**-7 / 2 / weight.numel() ** 0.5
    assert weight.double().mean().item() == pytest.approx(value, abs=5 * spread)
    assert set(weight.flatten().tolist()) == {1.0, 1.0 + 2.0**-7}


def ones(n_rows):
    return torch.ones(1, n_rows), torch.ones(1, 64)


@FEW
@given(
    n_steps=st.integers(1, 4),
    n_edges=st.integers(1, 7),
    n_beam=st.integers(1, 3),
    beta=st.sampled_from([1.0, 3.0]),
    decay=st.sampled_from([0.0, 0.1]),
    seed=SEEDS,
)
def test_edges_of_touched_clusters_move_by_the_gradient_of_the_paths(
    n_steps, n_edges, n_beam, beta, decay, seed
):
    generator, n_clusters, n_labels = generator_of(seed), 4, 9
    edge_labels = integers(generator, n_labels + 2, n_clusters, n_edges).clamp(max=n_labels)
    graph = LabelGraph(
        edge_labels, n_labels, beta, edge_logits=normal(generator, n_clusters, n_edges)
    )
    logits = graph.edge_logits.detach()
    held, first = IndexGradients(logits), logits.double()
    moments = torch.zeros_like(logits), torch.zeros_like(logits)
    state = RowState(*moments, torch.zeros(n_clusters, dtype=torch.int32))
    history, seen = History(), []
    for lr in LRS[:n_steps]:
        beam = torch.stack([torch.randperm(n_clusters, generator=generator) for _ in range(3)])
        beam = beam[:, :n_beam]
        paths = stored_paths(generator, beam, edge_labels, n_labels)
        upstream = normal(generator, *paths.shape)
        clusters = normal(generator, 3, n_clusters).requires_grad_()
        twin = clusters.detach().clone().requires_grad_()
        graph.edge_logits.grad = None

        scores = gpu_paths.edge_log(logits, edge_labels, n_labels=n_labels, beta=beta)
        actual = path_log(clusters, scores, beam, paths, held)
        (actual * upstream).sum().backward()
        slow_scores = graph.unsaturated_log()
        expected = slow_path_log(twin, slow_scores, beam, paths)
        (expected * upstream).sum().backward()
        torch.testing.assert_close(scores, slow_scores.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(clusters.grad, twin.grad, rtol=1e-4, atol=1e-5)
        touched = held.touched.nonzero().flatten().tolist()
        seen.append({row: graph.edge_logits.grad[row].double() for row in touched})
        history.add(RATES._replace(lr=lr, decay=decay))
        gpu_adamw.adamw_edges(
            logits, edge_labels, state, held.by_edge, held.touched, history, n_labels=n_labels
        )

    assert not held.by_edge.any()
    assert not held.touched.any()
    for row in range(n_clusters):
        last = int(state.last_step[row])
        rest = LRS[:last], (0.9, 0.99), 1e-8, decay
        expected = reference.adamw(first, seen[:last], *rest)[row]
        expected = torch.where(edge_labels[row] < n_labels, expected, first[row])  # no edge: stays
        torch.testing.assert_close(logits[row].double(), expected, rtol=2e-3, atol=2e-3)


def stored_paths(generator, beam, edge_labels, n_labels):
    """Some paths of each point, -1 in the place of those without an edge."""
    n_edges = edge_labels.shape[1]
    paths = integers(generator, beam.shape[1] * n_edges, len(beam), 6)
    stored = edge_labels[beam.gather(1, paths // n_edges), paths % n_edges] < n_labels
    return paths.masked_fill(~stored, -1)


def slow_path_log(cluster_log, edge_log, beam, paths):
    n_edges, rows = edge_log.shape[1], []
    for point in range(len(beam)):
        for path in paths[point].tolist():
            cluster = beam[point, path // n_edges]
            both = cluster_log[point, cluster].clamp(max=0), edge_log[cluster, path % n_edges]
            rows.append(both[0] + both[1].clamp(max=0) if path >= 0 else torch.zeros(()))
    return torch.stack(rows).view(paths.shape)


class Lookup(TextEncoder):
    """φ is a row of a parameter."""

    def __init__(self, vectors):
        super().__init__()
        self.dim = vectors.shape[1]
        self.vectors = torch.nn.Parameter(vectors)

    def tokenize(self, texts):
        raise NotImplementedError

    fingerprint = ""

    def table_names(self):
        return set()

    def forward(self, batch):
        return self.vectors[batch.ids]


def make_model(seed, *, learned):
    generator, n_labels = generator_of(seed), 12
    rows = [torch.randperm(n_labels, generator=generator)[:5] for _ in range(4)]
    edges = torch.stack(rows)
    edges[integers(generator, 5, *edges.shape) == 0] = n_labels
    logits = normal(generator, 4, 5) * 2 if learned else None
    graph = LabelGraph(edges, n_labels, 2.5, edge_logits=logits)
    torch.manual_seed(seed)
    return EliasModel(Lookup(normal(generator, 3, 6)), graph, 2.0)


def make_batch(seed, model):
    rows = [torch.randperm(12, generator=generator_of(seed + i))[:3] for i in range(3)]
    positives = torch.stack(rows).sort(dim=1).values
    none = torch.tensor([model.graph.n_clusters])
    parents = torch.cat([model.graph.strongest_parents(), none])[positives]
    tokens = TokenBatch(ids=torch.arange(3), offsets=torch.arange(4), longest=1)
    return tokens, positives, parents, SearchSizes(3, 6)


@pytest.mark.parametrize("learned", [True, False])
@settings(max_examples=4)
@given(index_every=st.integers(1, 3), seed=SEEDS)
def test_a_model_trained_by_the_kernels_is_the_one_trained_without(learned, index_every, seed):
    stage = make_stage(index_every=index_every, learn_graph=learned, label_eps=1e-3, edge_lr=0.01)
    slow, fast = (make_model(seed, learned=learned) for _ in range(2))
    losses = []

    for model in (slow, fast):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optim, "runs_triton", lambda _, by_kernels=model is fast: by_kernels)
            optimizer = Optimizer(model, stage)
        for step in range(index_every):
            tokens, *batch = make_batch(seed + 10 * step, model)
            actual = model.losses(
                model.encoder(tokens),
                *batch,
                shortlist_weight=0.3,
                mean=False,
                gradients=optimizer.gradients,
            )
            actual.total.backward()
            optimizer.step(1.0 - 0.3 * step)
            losses.append(actual.total.detach())

    assert optimizer.gradients is not None
    torch.testing.assert_close(losses[:index_every], losses[index_every:], rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("learned", [True, False])
def test_a_kernel_optimizer_resumes_from_its_state(learned, monkeypatch):
    monkeypatch.setattr(optim, "runs_triton", lambda _: True)
    stage = make_stage(index_every=2, learn_graph=learned, label_eps=1e-3, edge_lr=0.01)

    def train(model, optimizer, steps):
        for step in steps:
            tokens, *batch = make_batch(10 * step, model)
            actual = model.losses(
                model.encoder(tokens),
                *batch,
                shortlist_weight=0.3,
                mean=False,
                gradients=optimizer.gradients,
            )
            actual.total.backward()
            optimizer.step(1.0 - 0.2 * step)

    whole, first, second = (make_model(7, learned=learned) for _ in range(3))
    train(whole, Optimizer(whole, stage), range(4))
    optimizer = Optimizer(first, stage)
    train(first, optimizer, range(2))
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    second.load_state_dict(first.state_dict())
    optimizer = Optimizer(second, stage)

    optimizer.restore(state)
    train(second, optimizer, range(2, 4))

    for (name, one), other in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name


def rerun(work):
    """Stand in for a CUDA graph: do the work again, and leave the results in the same memory."""
    work()  # once before it is recorded
    actual = work()

    def replay():
        again = work()
        for one, other in zip(*((of.losses, *of.pairs) for of in (actual, again)), strict=True):
            one.copy_(other)

    return replay, actual


@pytest.mark.parametrize("learned", [True, False])
@settings(max_examples=3)
@given(index_every=st.integers(1, 3), seed=SEEDS)
def test_a_captured_step_trains_the_same_model(learned, index_every, seed):
    stage = make_stage(index_every=index_every, learn_graph=learned)
    plain, captured = (make_model(seed, learned=learned) for _ in range(2))
    options = {"shortlist_weight": 0.3, "mean": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "runs_triton", lambda _: True)
        optimizers = [Optimizer(model, stage) for model in (plain, captured)]
    held = [optimizer.gradients for optimizer in optimizers]
    step = CudaGraphStep(
        captured,
        held[1],
        lambda *batch: captured.losses(*batch, SearchSizes(3, 6), **options, gradients=held[1]),
        accumulates=index_every > 1,
        batch_size=3,
        record=rerun,
    )

    for i in range(index_every + 1):
        tokens, *labels, sizes = make_batch(seed + 10 * i, plain)
        expected = plain.losses(plain.encoder(tokens), *labels, sizes, **options, gradients=held[0])
        expected.total.backward()
        actual = step(tokens, *labels)
        for optimizer in optimizers:
            optimizer.step(1.0)
        torch.testing.assert_close(tuple(actual), tuple(part.detach() for part in expected))

    for one, other in zip(plain.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_that_cannot_be_captured_runs_eagerly(monkeypatch, caplog):
    monkeypatch.setattr(optim, "runs_triton", lambda _: True)

    def broken(_):
        raise RuntimeError("no graphs on this driver")

    model = make_model(1, learned=True)
    held = Optimizer(model, make_stage(learn_graph=True)).gradients
    options = {"shortlist_weight": 0.3, "mean": False, "gradients": held}
    tokens, *labels, sizes = make_batch(1, model)
    step = CudaGraphStep(
        model,
        held,
        lambda *batch: model.losses(*batch, sizes, **options),
        accumulates=False,
        batch_size=3,
        record=broken,
    )

    for _ in range(2):  # a shape is recorded when it comes again
        actual = step(tokens, *labels)

    expected = model.losses(model.encoder(tokens), *labels, sizes, **options)
    torch.testing.assert_close(actual.total, expected.total)
    assert "no graphs on this driver" in caplog.text
    assert model.encoder.vectors.grad.abs().sum() > 0


@FEW
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    n_heads=st.integers(1, 3),
    size=st.sampled_from([16, 32, 12]),  # the last one is left to plain torch
    longest=st.sampled_from([20, 64, 65]),
    seed=SEEDS,
)
def test_attention_stays_within_each_text(lengths, n_heads, size, longest, seed):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    shape = int(bounds[-1]), n_heads, size
    *inputs, direction = (normal(generator_of(seed + i), *shape) for i in range(4))

    def with_gradients(attend, dtype):
        parts = [part.to(dtype).requires_grad_() for part in inputs]
        result = attend(*parts)
        return result, *torch.autograd.grad(result, parts, direction.to(dtype))

    def kernel(*parts):
        return gpu_attention.packed_attention(*parts, bounds.to(torch.int32), longest)

    actual = with_gradients(kernel, torch.float32)
    expected = with_gradients(
        lambda *parts: reference.attention(*parts, bounds.tolist()), torch.float64
    )

    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
