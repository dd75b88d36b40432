"""Compare every Triton kernel with plain torch in float64 on random inputs, on the device.

PYTHONPATH=src python3 benchmarks/gpu_check.py --out results
TRITON_INTERPRET=1 PYTHONPATH=src python3 benchmarks/gpu_check.py --device cpu   # small, slow
"""

import argparse
import copy
import math
import time
import traceback
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from gpu_setup import STAGE, Results, Rows, Shape, bert_base, make_batches, make_model, table

from elias.kernels import (
    Expansion,
    IndexGradients,
    label_logits,
    path_log,
    plain,
    shortlist_bce,
)
from elias.kernels.adamw_state import (
    AdamWRates,
    History,
    LinearState,
    RowState,
    apply_pending_decay,
)
from elias.kernels.gpu import attention as gpu_attention
from elias.kernels.gpu import loss as gpu_loss
from elias.kernels.gpu import paths as gpu_paths
from elias.kernels.gpu import rows as gpu_rows
from elias.kernels.gpu import search as gpu_search
from elias.kernels.gpu.adamw import adamw_edges, adamw_pairs
from elias.model.batch_inference import SEARCH_GRAPHS, rank_all
from elias.model.elias import SearchSizes
from elias.text.batches import TokenBatch, fixed_size_batch
from elias.text.tokens import Tokens
from elias.training.cuda_graph_step import CudaGraphStep
from elias.training.optimizer import Optimizer, schedule

RATES = AdamWRates(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1)


class Size(NamedTuple):
    """Sizes of the checks."""

    points: int
    labels: int
    clusters: int
    edges: int
    beam: int
    keep: int
    dim: int


DEVICE_SIZE = Size(48, 60_000, 700, 500, 25, 2000, 768)
CPU_SIZE = Size(6, 2000, 50, 100, 8, 200, 64)  # numba may be missing, so keep it small
SMALL_SIZE = Size(3, 90, 7, 12, 4, 20, 24)


def error_of(actual, expected):
    """Return ‖found − expected‖ / ‖expected‖; infinite if a number is missing."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if actual.shape != expected.shape or not actual.isfinite().all():
        return math.inf
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def falling(step, n_steps):
    """Return the factor of the learning rate in a step (from 1) of a schedule."""
    return schedule(step - 1, n_steps)


def poison(device):
    """Fill free memory with visible values, so that reading uninitialised memory shows."""
    blocks = [torch.full((2**22,), torch.nan, device=device) for _ in range(8)]
    del blocks


def random_tokens(rng, n_texts, longest):
    """Return texts of random words and lengths; some are empty."""
    offsets = np.append(0, rng.integers(0, longest + 1, n_texts).cumsum())
    return Tokens(offsets, rng.integers(1000, 30_522, offsets[-1]).astype(np.int32))


@contextmanager
def kept_early():
    """Capture a shape when it occurs for the third time."""
    before, SEARCH_GRAPHS.min_calls = SEARCH_GRAPHS.min_calls, 2
    try:
        yield
    finally:
        SEARCH_GRAPHS.min_calls = before


def kept_graphs(model):
    """Return the captured searches of a model, by shape."""
    return SEARCH_GRAPHS.by_model[model].captured._graphs


class NotHereError(Exception):
    """A check that this device cannot run."""


class Checks:
    def __init__(self, device, size):
        self.device, self.size = device, size

    def _needs_cuda(self):
        if self.device.type != "cuda":
            raise NotHereError

    def ints(self, high, *shape):
        return torch.randint(high, shape, device=self.device)

    def normal(self, *shape):
        return torch.randn(shape, device=self.device)

    # search

    def _beam(self, size, *, ties):
        edge_labels = self.ints(size.labels + size.labels // 20 + 1, size.clusters, size.edges)
        edge_labels.clamp_(max=size.labels)
        edge_log = self.normal(size.clusters, size.edges)
        beam_log = self.normal(size.points, size.beam) - 1
        if ties == "all":  # the fixed graph of stage 1
            edge_log, beam_log = edge_log * 0, beam_log.clamp(min=0.5)
        elif ties:
            edge_log, beam_log = edge_log.mul(2).round().div(2), beam_log.round()
        edge_log.masked_fill_(edge_labels == size.labels, -math.inf)
        rank = torch.rand(size.points, size.clusters + 1, device=self.device)
        beam = rank.topk(min(size.beam, size.clusters), dim=1).indices  # C: an empty slot
        beam_log = beam_log[:, : beam.shape[1]].contiguous()
        wanted = self.ints(size.labels + 1, size.points, 7).sort(dim=1).values
        return beam, beam_log, edge_labels, edge_log, wanted

    def _expand(self, size, n_listed=None, **options):
        given = self._beam(size, **options)
        poison(self.device)
        actual = gpu_search.expand_beam(*given, size.labels, size.keep, n_listed=n_listed)
        expected = Expansion(*plain.expand_beam(*given, size.labels, size.keep))
        n_paths = given[0].shape[1] * size.edges + 1
        keys = [(labels * n_paths + paths).sort(dim=1).values for labels, paths in
                (actual[:2], expected[:2])]  # fmt: skip
        wrong = (keys[0] != keys[1]).sum() + (actual[2] != expected.wanted_paths).sum()
        return wrong.item(), 0

    def expand(self):
        return self._expand(self.size, ties=False)

    def expand_with_ties(self):
        return self._expand(self.size, ties=True)

    def expand_short_list(self):
        """The list has too few labels, so the kernel starts over with all paths."""
        return self._expand(self.size, n_listed=self.size.keep + 10, ties=False)

    def expand_long_list(self):
        return self._expand(self.size, n_listed=3 * self.size.keep, ties=False)

    def expand_many_points(self):
        """More points than multiprocessors: each program handles several points."""
        many = self.size._replace(points=6 * self.size.points)
        return self._expand(many, n_listed=3 * self.size.keep, ties=False)

    def expand_without_list(self):
        return self._expand(self.size, n_listed=0, ties=True)

    def expand_wanted_often(self):
        """So few labels that many paths lead to a positive one."""
        few = self.size._replace(labels=max(8, self.size.keep // 2))
        return self._expand(few, n_listed=self.size.keep, ties=True)

    def expand_fixed_graph(self):
        return self._expand(self.size, ties="all")

    def expand_few_labels(self):
        return self._expand(self.size._replace(labels=self.size.keep + 3), ties=True)

    def expand_keep_all(self):
        return self._expand(self.size._replace(beam=2), ties=True)

    def expand_one_point(self):
        return self._expand(self.size._replace(points=1), ties=True)

    def expand_wide_beam(self):
        return self._expand(self.size._replace(points=3, beam=5 * self.size.beam), ties=True)

    def expand_many_labels(self):
        return self._expand(self.size._replace(labels=100 * self.size.labels), ties=True)

    # rows

    def _rows(self, dtype, n_labels=None):
        size = self.size
        n_labels = n_labels or size.labels
        weight = torch.empty(n_labels, size.dim, device=self.device, dtype=dtype).normal_()
        labels = self.ints(n_labels + n_labels // 20 + 1, size.points, size.keep)
        labels.clamp_(max=n_labels)
        return self.normal(size.points, size.dim), weight, self.normal(n_labels), labels

    def _gather_dot(self, dtype, n_labels=None):
        embedding, weight, bias, labels = self._rows(dtype, n_labels)
        poison(self.device)
        actual = gpu_rows.gather_dot(embedding, weight, bias, labels)
        safe = labels.clamp(max=len(weight) - 1)
        expected = torch.stack(
            [
                weight[safe[i]].double() @ embedding[i].double() + bias[safe[i]]
                for i in range(len(labels))
            ]
        ).masked_fill(labels >= len(weight), 0)
        return error_of(actual, expected), 1e-5

    def gather_dot(self):
        return self._gather_dot(torch.float32)

    def gather_dot_bf16(self):
        return self._gather_dot(torch.bfloat16)

    def gather_dot_beyond_2_31(self):
        n_labels = 3_000_000 if self.device.type == "cuda" else self.size.labels
        return self._gather_dot(torch.bfloat16, n_labels)

    def _gather_sum(self, dtype):
        _, weight, _, labels = self._rows(dtype)
        g = self.normal(*labels.shape)
        poison(self.device)
        actual = gpu_rows.gather_sum(g, weight, labels)
        real = labels < len(weight)
        safe = labels.clamp(max=len(weight) - 1)
        expected = torch.stack(
            [
                (g[i] * real[i]).double() @ weight[safe[i]].double()
                for i in range(len(labels))
            ]
        )  # fmt: skip
        return error_of(actual, expected), 1e-5

    def gather_sum(self):
        return self._gather_sum(torch.float32)

    def gather_sum_bf16(self):
        return self._gather_sum(torch.bfloat16)

    def _dense_gradient(self, labels, g, embedding, n_labels):
        rows = embedding.double().repeat_interleave(labels.shape[1], dim=0)
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)  # the last: the bias
        rows = rows * g.double().reshape(-1, 1)
        total = torch.zeros(n_labels + 1, rows.shape[1], dtype=torch.float64, device=self.device)
        return total.index_add_(0, labels.reshape(-1), rows)[:-1]

    def autograd_of_logits(self):
        embedding, weight, bias, labels = self._rows(torch.float32)
        parts = [part.requires_grad_() for part in (embedding, weight, bias)]
        upstream = self.normal(*labels.shape)
        held = IndexGradients(None)
        (label_logits(*parts, labels, held) * upstream).sum().backward()
        ids, g, points = held.take_pairs()
        real = labels < len(weight)
        expected = torch.einsum(
            "bk,bkd->bd",
            upstream.double() * real,
            weight.detach().double()[labels.clamp(max=len(weight) - 1)],
        )
        same = torch.equal(ids, labels) and torch.equal(points, embedding.detach())
        same = same and torch.equal(g, upstream) and weight.grad is None
        return error_of(embedding.grad, expected) if same else math.inf, 1e-5

    # loss

    def loss(self):
        size = self.size
        labels = torch.stack(
            [
                torch.randperm(size.labels, device=self.device)[: size.keep]
                for _ in range(size.points)
            ]
        )
        labels.masked_fill_(torch.rand(labels.shape, device=self.device) < 0.05, size.labels)
        positives = torch.cat([labels[:, :3], self.ints(size.labels + 1, size.points, 6)], dim=1)
        positives = positives.sort(dim=1).values
        z = self.normal(*labels.shape) * 5
        logs = -self.normal(*labels.shape).abs() * 3
        logs.masked_fill_(torch.rand(labels.shape, device=self.device) < 0.3, 0.0)
        poison(self.device)
        loss, by_z, by_log = gpu_loss.shortlist_bce(z, logs, labels, positives, size.labels)
        z, logs = (part.double().requires_grad_() for part in (z, logs))
        p = torch.sigmoid(z) * logs.exp()
        not_p = torch.sigmoid(-z) + torch.sigmoid(z) * -torch.expm1(logs)
        relevant = (labels.unsqueeze(-1) == positives.unsqueeze(1)).any(dim=-1)
        stored = labels < size.labels
        each = torch.where(relevant, -p.log(), -not_p.log())
        each.masked_fill(~stored, 0).sum().backward()
        total = each.masked_fill(~stored, 0).sum()
        errors = error_of(loss, total), error_of(by_z, z.grad), error_of(by_log, logs.grad)
        return max(errors), 2e-5

    def _label_loss(self, dtype):
        """Check logits, loss and all gradients together."""
        size = self.size
        embedding, weight, bias, labels = self._rows(dtype)
        weight, bias = weight / 20, bias / 3
        positives = torch.cat([labels[:, :3], self.ints(size.labels + 1, size.points, 6)], dim=1)
        positives = positives.sort(dim=1).values
        logs = -self.normal(*labels.shape).abs()
        poison(self.device)
        held = IndexGradients(None)
        leaves = [part.clone().requires_grad_() for part in (embedding, logs)]
        logits = gpu_rows.label_logits(leaves[0], weight, bias, labels, held)
        loss = shortlist_bce(logits, leaves[1], labels, positives, size.labels)
        loss.backward()
        actual = loss.detach(), leaves[0].grad, held.take_pairs()[1], leaves[1].grad
        stored = labels < size.labels
        safe = labels.clamp(max=size.labels - 1)
        points, logs = (part.double().requires_grad_() for part in (embedding, logs))
        z = [weight[safe[i]].double() @ points[i] + bias[safe[i]] for i in range(len(labels))]
        z = torch.stack(z)
        z.retain_grad()
        p = torch.sigmoid(z) * logs.exp()
        not_p = torch.sigmoid(-z) + torch.sigmoid(z) * -torch.expm1(logs)
        relevant = (labels.unsqueeze(-1) == positives.unsqueeze(1)).any(dim=-1)
        each = torch.where(relevant, -p.log(), -not_p.log()).masked_fill(~stored, 0)
        each.sum().backward()
        expected = (each.sum(), points.grad, z.grad, logs.grad)
        return max(error_of(one, other) for one, other in zip(actual, expected, strict=True)), 2e-5

    def label_loss(self):
        return self._label_loss(torch.float32)

    def label_loss_bf16(self):
        return self._label_loss(torch.bfloat16)

    def loss_stays_finite(self):
        z = torch.tensor([-200.0, -90, -1e-8, 0, 1e-8, 90, 200], device=self.device)
        logs = torch.tensor([0.0, -1e-8, -1e-3, -200], device=self.device)
        z, logs = (part.flatten()[None] for part in torch.meshgrid(z, logs, indexing="ij"))
        labels = torch.arange(z.shape[1], device=self.device)[None]
        worst = 0
        for positives in (labels[:, ::2].contiguous(), labels):
            for part in gpu_loss.shortlist_bce(z, logs, labels, positives, z.shape[1]):
                worst += (~part.isfinite()).sum().item()
        return worst, 0

    # updates

    def _pairs(self, n_rows, dim):
        ids = self.ints(n_rows + n_rows // 10 + 1, self.size.points, 30).clamp(max=n_rows)
        g = self.normal(*ids.shape) * 1e-2
        return ids, g, self.normal(self.size.points, dim)

    def _linear_state(self, weight, width):
        zeros = torch.zeros(len(weight), device=self.device)
        return LinearState(
            torch.zeros_like(weight),
            torch.zeros(len(weight), width, device=self.device),
            zeros.clone(),
            zeros.clone(),
            torch.zeros(len(weight), dtype=torch.int32, device=self.device),
        )

    def _adamw(self, dtype, n_steps=7, n_warps=None):
        n_rows, dim = 4 * self.size.points * 10, self.size.dim
        weight, bias = self.normal(n_rows, dim).to(dtype), self.normal(n_rows)
        compact = dtype == torch.bfloat16
        state = self._linear_state(weight, 1 if compact else dim)
        twin = torch.cat([weight.double(), bias.double().unsqueeze(1)], dim=1)
        mean, variance = torch.zeros_like(twin), torch.zeros_like(twin)
        last = torch.zeros(n_rows, dtype=torch.float64, device=self.device)
        decay = torch.full((dim + 1,), RATES.decay, dtype=torch.float64, device=self.device)
        decay[-1] = 0
        history, pending_decay = History(self.device), torch.ones_like(twin)
        for step in range(1, n_steps + 1):
            ids, g, vectors = self._pairs(n_rows, dim)
            pairs = gpu_rows.pair_rows(ids, g, vectors)
            lr = RATES.lr * falling(step, n_steps)
            history.add(RATES._replace(lr=lr))
            adamw_pairs(weight, bias, state, pairs, history, n_warps=n_warps)
            gradient = self._dense_gradient(ids, g, vectors, n_rows)
            squares = gradient.square()
            if compact:
                squares[:, :-1] = squares[:, :-1].mean(dim=1, keepdim=True)
            rows = ids.unique()
            rows = rows[rows < n_rows]
            skipped = (step - last[rows]).unsqueeze(1)
            mean[rows] = mean[rows] * 0.9**skipped + 0.1 * gradient[rows]
            variance[rows] = variance[rows] * 0.999**skipped + 0.001 * squares[rows]
            pending_decay *= 1 - lr * decay  # the decay of the steps since the row was last updated
            twin[rows] *= pending_decay[rows]
            pending_decay[rows] = 1
            size = (variance[rows] / (1 - 0.999**step)).sqrt() + RATES.eps
            twin[rows] -= lr / (1 - 0.9**step) * mean[rows] / size
            last[rows] = step
        actual = torch.cat([weight.double(), bias.double().unsqueeze(1)], dim=1)
        errors = [error_of(actual, twin), error_of(bias, twin[:, -1])]
        if not torch.equal(state.last_step.double(), last):
            errors.append(math.inf)
        means, variances = (state.mean, state.bias_mean), (state.variance, state.bias_variance)
        apply_pending_decay(weight, means, variances, state.last_step, history)
        errors.append(error_of(weight, (twin * pending_decay)[:, :-1]))
        return max(errors), (1e-2 if compact else 1e-5)

    def adamw_rows(self):
        return self._adamw(torch.float32)

    def adamw_rows_compact(self):
        return self._adamw(torch.bfloat16)

    def adamw_rows_compact_2_warps(self):
        return self._adamw(torch.bfloat16, n_warps=2)

    def rounding_on_average(self):
        n_rows, dim = 64, 256
        weight = torch.ones(n_rows, dim, device=self.device).bfloat16()
        state = self._linear_state(weight, 1)
        ids = torch.arange(n_rows, device=self.device).view(1, -1)
        ones = torch.ones(1, n_rows, device=self.device), torch.ones(1, dim, device=self.device)
        history = History(self.device)
        history.add(AdamWRates(lr=-0.001, beta1=0.0, beta2=0.0, eps=0.0, decay=0.0))
        bias = torch.zeros(n_rows, device=self.device)
        adamw_pairs(weight, bias, state, gpu_rows.pair_rows(ids, *ones), history)
        spread = 2.0**-7 / 2 / weight.numel() ** 0.5
        return abs(weight.double().mean().item() - 1.001), 5 * spread

    def _graph(self):
        size = self.size
        edge_labels = self.ints(size.labels + size.labels // 20 + 1, size.clusters, size.edges)
        return self.normal(size.clusters, size.edges), edge_labels.clamp_(max=size.labels)

    def edge_scores(self):
        logits, labels = self._graph()
        poison(self.device)
        actual = gpu_paths.edge_log(logits, labels, n_labels=self.size.labels, beta=20.0)
        stored = labels < self.size.labels
        free = logits.double().masked_fill(~stored, -math.inf).log_softmax(dim=1) + math.log(20.0)
        wrong = 0.0 if torch.equal(actual == -math.inf, ~stored) else math.inf
        beam = self.ints(len(logits) + 1, 2, 3)  # C: an empty slot
        some = gpu_paths.edge_log(logits, labels, n_labels=self.size.labels, beta=20.0, beam=beam)
        rows = beam[beam < len(logits)]
        wrong += 0.0 if torch.equal(some[rows], actual[rows]) else math.inf
        return error_of(actual[stored], free[stored]) + wrong, 1e-5

    def _paths(self, labels):
        size = self.size
        rank = torch.rand(size.points, size.clusters, device=self.device)
        beam = rank.topk(min(size.beam, size.clusters), dim=1).indices
        paths = self.ints(beam.shape[1] * size.edges, size.points, size.keep)
        stored = labels[beam.gather(1, paths // size.edges), paths % size.edges] < size.labels
        return beam, paths.masked_fill(~stored, -1)

    def paths_and_edges(self):
        """Check path scores, both gradients, and three updates of the edges."""
        size = self.size
        logits, labels = self._graph()
        stored = labels < size.labels
        twin = logits.double().requires_grad_()
        held = IndexGradients(logits)
        steps = torch.zeros(size.clusters, dtype=torch.int32, device=self.device)
        state = RowState(torch.zeros_like(logits), torch.zeros_like(logits), steps)
        mean, variance = torch.zeros_like(twin), torch.zeros_like(twin)
        last = torch.zeros(size.clusters, dtype=torch.float64, device=self.device)
        history, errors = History(self.device), []
        for step in range(1, 4):
            rates = RATES._replace(lr=RATES.lr * falling(step, 3), decay=0.0, eps=1e-3)
            history.add(rates)
            beam, paths = self._paths(labels)
            upstream = self.normal(*paths.shape)
            clusters = (self.normal(size.points, size.clusters) * 2).requires_grad_()
            other = clusters.detach().double().requires_grad_()
            scores = gpu_paths.edge_log(logits, labels, n_labels=size.labels, beta=20.0)
            poison(self.device)
            actual = path_log(clusters, scores, beam, paths, held)
            (actual * upstream).sum().backward()
            touched = held.touched.bool().clone()
            adamw_edges(
                logits, labels, state, held.by_edge, held.touched, history, n_labels=size.labels
            )

            free = twin.masked_fill(~stored, -math.inf).log_softmax(dim=1) + math.log(20.0)
            safe = paths.clamp(min=0)
            own = beam.gather(1, safe // size.edges)
            both = other.gather(1, own).clamp(max=0) + free[own, safe % size.edges].clamp(max=0)
            expected = torch.where(paths >= 0, both, 0.0)
            (g,) = torch.autograd.grad((expected * upstream).sum(), twin, retain_graph=True)
            (by_cluster,) = torch.autograd.grad((expected * upstream).sum(), other)
            errors += [error_of(actual, expected), error_of(clusters.grad, by_cluster)]
            skipped = (step - last[touched]).unsqueeze(1)
            with torch.no_grad():
                mean[touched] = mean[touched] * 0.9**skipped + 0.1 * g[touched]
                variance[touched] = variance[touched] * 0.999**skipped + 0.001 * g[touched] ** 2
                size_ = (variance[touched] / (1 - 0.999**step)).sqrt() + rates.eps
                twin[touched] -= rates.lr / (1 - 0.9**step) * mean[touched] / size_
            last[touched] = step
        errors += [error_of(logits, twin)]
        errors += [0.0 if not held.by_edge.any() and not held.touched.any() else math.inf]
        return max(errors), 1e-4

    # the whole

    def _model(self, size=None):
        size = size or self.size
        shape = Shape(
            "check", size.labels, size.clusters, size.points, 4,
            n_edges=size.edges, shortlist_size=size.keep, beam_size=size.beam,
            train_clusters=size.beam, beta=20.0,
        )  # fmt: skip
        model = make_model(shape, Rows(shape.batch, 64), self.device, compact=False)
        return shape, model, make_batches(shape, model, self.device)

    def model_gradients(self):
        """Loss and gradients equal those of plain torch on the device."""
        shape, model, batches = self._model()
        sizes = SearchSizes(shape.train_clusters, shape.shortlist_size)
        twin = copy.deepcopy(model)
        held = IndexGradients(model.graph.edge_logits.detach())
        options = {"shortlist_weight": 0.3, "mean": False}
        tokens, *labels = batches[0]
        actual = model.losses(model.encoder(tokens), *labels, sizes, **options, gradients=held)
        actual.total.backward()
        expected = twin.losses(twin.encoder(tokens), *labels, sizes, **options)
        expected.total.backward()
        errors = [error_of(one, other) for one, other in zip(actual, expected, strict=True)]
        errors += [
            error_of(one.grad, other.grad)
            for one, other in (
                (model.encoder.vectors, twin.encoder.vectors),
                (model.clusters.weight, twin.clusters.weight),
            )
        ]
        dense = self._dense_gradient(*held.take_pairs(), shape.n_labels)[:, :-1]
        slow = twin.labels.weight.grad
        errors.append(error_of(dense, slow.to_dense() if slow.is_sparse else slow))
        stored = model.graph.edge_labels < shape.n_labels
        logits = model.graph.edge_logits.detach().masked_fill(~stored, -math.inf)
        by_logits = held.by_edge - logits.softmax(1) * held.by_edge.sum(1, keepdim=True)
        errors.append(error_of(by_logits, twin.graph.edge_logits.grad))
        return max(errors), 1e-3

    def training_as_on_the_cpu(self):
        """Compare three optimizer steps on GPU and CPU; the third updates the index."""
        self._needs_cuda()
        shape, model, batches = self._model(CPU_SIZE)
        twin = copy.deepcopy(model).cpu()
        stage = replace(STAGE, index_every=3, label_eps=1e-4)
        sizes = SearchSizes(shape.train_clusters, shape.shortlist_size)
        before = [p.detach().cpu().clone() for p in twin.parameters()]
        for one in (model, twin):
            optimizer = Optimizer(one, stage)
            device = one.labels.weight.device
            for batch in batches[:3]:
                tokens = batch.tokens
                tokens = TokenBatch(  # its own `to` requires a tensor on the host
                    tokens.ids.to(device), tokens.offsets.to(device), tokens.longest
                )
                losses = one.losses(
                    one.encoder(tokens).float(),
                    batch.positives.to(device),
                    batch.parents.to(device),
                    sizes,
                    shortlist_weight=0.3,
                    mean=False,
                    gradients=optimizer.gradients,
                )
                losses.total.backward()
                optimizer.step(1.0)
        names = [name for name, _ in model.named_parameters()]
        both = zip(model.parameters(), twin.parameters(), before, strict=True)
        errors = [error_of(one.cpu() - first, other - first) for one, other, first in both]
        print(f"# moved: {dict(zip(names, errors, strict=True))}")
        return max(errors), 2e-2

    def captured_step(self):
        """Compare training with and without CUDA graphs, on texts of two lengths."""
        self._needs_cuda()
        encoder = bert_base(24, self.device, layers=2, width=128, dropout=0.0)
        return self._captured(encoder)

    def captured_compiled_step(self):
        self._needs_cuda()
        return self._captured(bert_base(24, self.device, "on", layers=2, width=128, dropout=0.0))

    def captured_short_of_memory(self):
        """Graphs are dropped if a batch of another shape finds too little memory."""
        self._needs_cuda()
        encoder = bert_base(24, self.device, layers=4, width=256, dropout=0.0)
        return self._captured(encoder, widths=(24, 24, 24, 16, 24, 16), n_graphs=0, short_at=3)

    @contextmanager
    def _no_memory_left(self):
        """Allow no allocation beyond the memory that is freed meanwhile."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        room = torch.cuda.memory_reserved() + 2**24
        whole = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(room / whole)
        taken = []
        try:
            with suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(2**20 + 1, dtype=torch.uint8, device=self.device))
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def _captured(self, encoder, *, widths=(24, 16) * 3, n_graphs=2, short_at=None):
        size = self.size
        shape = Shape(
            "check", size.labels, size.clusters, 32, 24, n_edges=size.edges,
            shortlist_size=size.keep, train_clusters=size.beam,
        )  # fmt: skip
        model = make_model(shape, encoder, self.device, compact=False)
        twin = copy.deepcopy(model)
        twin.encoder.prepare(self.device)
        batches = make_batches(shape, model, self.device, n=6)
        sizes = SearchSizes(shape.train_clusters, shape.shortlist_size)
        optimizers = [Optimizer(one, replace(STAGE, label_eps=1e-4)) for one in (model, twin)]
        options = [
            {"shortlist_weight": 0.3, "mean": False, "gradients": optimizer.gradients}
            for optimizer in optimizers
        ]
        captured = CudaGraphStep(
            model,
            optimizers[0].gradients,
            lambda *batch: model.losses(*batch, sizes, **options[0]),
            accumulates=False,
            batch_size=32,
        )
        before = [p.detach().clone() for p in twin.parameters()]
        errors = []
        for i, (batch, width) in enumerate(zip(batches, widths, strict=True)):
            lengths = self.ints(16, 32) + (1 if width == 16 else 9)
            lengths = lengths.clamp(max=width)
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cpu().numpy()
            texts = Tokens(offsets, batch.tokens.ids[: offsets[-1]].int().cpu().numpy())
            packs = encoder.packs(self.device)
            # texts of the two widths need batches of two sizes
            tokens = fixed_size_batch(
                texts, np.arange(32), pad_id=0, max_length=width, packs=packs
            ).to(self.device)
            with self._no_memory_left() if i == short_at else nullcontext():
                actual = captured(tokens, batch.positives, batch.parents)
            embedding = twin.encoder(tokens).float()
            expected = twin.losses(embedding, *batch[1:], sizes, **options[1])
            expected.total.backward()
            errors.append(error_of(actual.total, expected.total))
            for optimizer in optimizers:
                optimizer.step(1.0)
        assert len(captured._captured._graphs) == n_graphs, "other graphs than were expected"
        names = [name for name, _ in model.named_parameters()]
        both = zip(names, model.parameters(), twin.parameters(), before, strict=True)
        moved = {name: error_of(one - first, other - first) for name, one, other, first in both}
        worst = sorted(moved, key=moved.__getitem__)[-3:]
        print(f"# losses: {max(errors):.1e}; moved: { ({name: moved[name] for name in worst}) }")
        # attention does not depend on the keys' biases, so their updates are rounding noise
        errors += [error for name, error in moved.items() if not name.endswith("key.bias")]
        return max(errors), 5e-2

    def recorded_ranking(self):
        """Compare ranking with and without a CUDA graph."""
        self._needs_cuda()
        shape = Shape("check", 5000, 50, 32, 24, n_edges=200, shortlist_size=500)
        encoder = bert_base(24, self.device, layers=2, width=128)
        model = make_model(shape, encoder, self.device, compact=True).eval()
        batches = make_batches(shape, model, self.device)
        sizes = SearchSizes(shape.beam_size, shape.shortlist_size)
        errors = []
        with torch.inference_mode():
            captured = SEARCH_GRAPHS.capture(model, sizes, 20)
            for batch in batches:
                ids, offsets = batch.tokens.ids, batch.tokens.offsets
                actual = captured(ids, offsets, longest=24, filled=False)
                expected = model.rank(encoder(batch.tokens).float(), sizes, 20)
                errors.append(error_of(actual[1], expected[1]))
                errors.append((actual[0] != expected[0]).double().mean().item())
        return max(errors), 1e-2

    def kept_ranking(self):
        """Compare calls that reuse earlier graphs with single texts without graphs."""
        self._needs_cuda()
        shape = Shape("check", 5000, 50, 32, 64, n_edges=200, shortlist_size=500)
        encoder = bert_base(64, self.device, layers=2, width=128)
        encoder.precision = "float32"  # padding changes the rounding of bfloat16
        model = make_model(shape, encoder, self.device, compact=False).eval()
        sizes = SearchSizes(shape.beam_size, shape.shortlist_size)
        rng = np.random.default_rng(time.time_ns())
        errors, differing, n_ids = [], 0, 0
        with kept_early():
            for i in range(80):
                if i == 40:
                    assert len(kept_graphs(model)) > 1, "hardly anything was recorded"
                    with torch.no_grad():
                        model.graph.edge_logits.neg_()
                        model.labels.weight.neg_()
                tokens = random_tokens(rng, int(rng.choice([1, 2, 3, 32, 70])), 64)
                asked = tokens, sizes, int(rng.choice([5, 20, 100]))
                actual = rank_all(model, *asked, batch_size=32)
                encoder.capturable = False
                expected = rank_all(copy.deepcopy(model), *asked, batch_size=32)
                encoder.capturable = True
                scores = (torch.from_numpy(part.scores) for part in (actual, expected))
                errors.append(error_of(*scores))
                differing += (actual.ids != expected.ids).sum()
                n_ids += actual.ids.size
        return max(*errors, differing / n_ids), 1e-2

    def _attention(self, dtype, *, longest, n_heads, size, n_texts=60):
        """Return the errors of the attention of packed texts and of its gradients."""
        lengths = torch.randint(0, longest + 1, (n_texts,))
        lengths[0] = longest
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        parts = [self.normal(bounds[-1], n_heads, size).to(dtype) for _ in range(4)]

        def results(attend, parts, bounds):
            parts = [part.detach().requires_grad_() for part in parts]
            result = attend(*parts[:3], bounds, longest)
            result.backward(parts[3])
            return [result, *(part.grad for part in parts[:3])]

        poison(self.device)
        actual = results(gpu_attention.packed_attention, parts, bounds.to(self.device))
        expected = results(plain.packed_attention, [part.cpu().double() for part in parts], bounds)
        return max(map(error_of, actual, expected)), 2e-2 if dtype == torch.bfloat16 else 3e-3

    def attention(self):
        self._needs_cuda()  # the interpreter cannot multiply in bfloat16
        return self._attention(torch.bfloat16, longest=64, n_heads=12, size=64)

    def attention_of_short_texts(self):
        self._needs_cuda()
        return self._attention(torch.bfloat16, longest=23, n_heads=12, size=32)

    def attention_of_few_tokens(self):
        return self._attention(torch.float32, longest=5, n_heads=2, size=16, n_texts=7)

    def attention_of_long_texts(self):
        self._needs_cuda()
        return self._attention(torch.bfloat16, longest=200, n_heads=12, size=64, n_texts=20)

    def predictions_as_on_the_cpu(self):
        self._needs_cuda()
        shape, model, _ = self._model(CPU_SIZE)
        embedding = model.encoder.vectors.detach()
        sizes = SearchSizes(shape.beam_size, shape.shortlist_size)
        labels, p = model.rank(embedding, sizes, 100)
        other_labels, other_p = copy.deepcopy(model).cpu().rank(embedding.cpu(), sizes, 100)
        share = (labels.cpu() != other_labels).double().mean().item()
        return error_of(p, other_p) + (math.inf if share > 0.01 else 0.0), 1e-4

    def no_synchronisation(self):
        """Neither a training step nor pending weight decay synchronises with the device."""
        self._needs_cuda()
        shape, model, batches = self._model()
        optimizer = Optimizer(model, STAGE)
        sizes = SearchSizes(shape.train_clusters, shape.shortlist_size)

        def step(batch):
            losses = model.losses(
                model.encoder(batch.tokens),
                batch.positives,
                batch.parents,
                sizes,
                shortlist_weight=0.3,
                mean=False,
                gradients=optimizer.gradients,
            )
            losses.total.backward()
            optimizer.step(1.0)

        step(batches[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(batches[1])
            optimizer.apply_pending_decay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return 0, 0


NAMES = [name for name in vars(Checks) if not name.startswith("_") and name != "ints"]
NAMES.remove("normal")
NOT_IF_QUICK = {  # slow, or similar to another
    "predictions_as_on_the_cpu",
    "expand_keep_all",
    "gather_dot",
    "gather_sum",
    "label_loss",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="skip some checks: half a minute")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.manual_seed(time.time_ns() % 2**31)
    size = DEVICE_SIZE if device.type == "cuda" else SMALL_SIZE
    checks, results, rows = Checks(device, size), Results(given.out, "gpu_check"), []
    for name in given.only:
        if given.quick and name in NOT_IF_QUICK:
            continue
        start = time.monotonic()
        try:
            error, limit = getattr(checks, name)()
            if device.type == "cuda":
                torch.cuda.synchronize()
            verdict = "PASS" if error <= limit else "FAIL"
            note = ""
        except NotHereError:
            verdict, error, limit, note = "SKIP", math.nan, math.nan, "needs a GPU"
        except Exception as problem:  # a failing kernel must not stop the other checks
            verdict, error, limit = "FAIL", math.nan, math.nan
            note = f"{type(problem).__name__}: {str(problem)[:300]}"
            traceback.print_exc()
        seconds = time.monotonic() - start
        results(name, {"verdict": verdict, "error": error, "limit": limit, "note": note})
        rows.append((verdict, name, f"{error:.2e}", f"{limit:.0e}", f"{seconds:.1f} s"))
    table("kernels against float64", ("", "check", "error", "limit", "took"), rows)
    failed = sum(row[0] == "FAIL" for row in rows)
    skipped = sum(row[0] == "SKIP" for row in rows)
    print(f"{len(rows) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
