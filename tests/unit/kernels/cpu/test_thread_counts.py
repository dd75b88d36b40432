"""A step's compiled loops give the same bits with one thread and with two."""

import numba
import pytest
import torch

from elias.kernels import (
    adamw_dense,
    bag_sum,
    expand_beam,
    label_logits,
    path_log,
    shortlist_bce,
)
from elias.kernels.adamw_state import AdamWRates
from elias.kernels.one_vs_all_loss import every_label_loss
from label_chunks import in_chunks

N_LABELS, N_CLUSTERS, N_EDGES, WIDTH = 300, 12, 40, 20


def step():
    """The losses of a step behind the encoder and all gradients they leave."""
    torch.manual_seed(0)
    words = torch.randn(50, WIDTH, requires_grad=True)
    clusters = torch.randn(N_CLUSTERS, WIDTH, requires_grad=True)
    edges = torch.randn(N_CLUSTERS, N_EDGES, requires_grad=True)
    weight = torch.randn(N_LABELS, WIDTH, requires_grad=True)
    bias = torch.zeros(N_LABELS, requires_grad=True)
    edge_labels = torch.stack([torch.randperm(N_LABELS)[:N_EDGES] for _ in range(N_CLUSTERS)])
    wanted = torch.randint(0, N_LABELS, (33, 4)).sort(dim=1).values
    ids, offsets = torch.randint(0, 50, (33 * 6,)), torch.arange(34) * 6

    embedding = bag_sum(words, ids, offsets, torch.rand(len(ids)))
    cluster_log = (embedding @ clusters.T).log_softmax(dim=1) + 2
    edge_log = edges.log_softmax(dim=1) + 3
    beam = cluster_log.detach().topk(7, dim=1).indices
    expansion = expand_beam(
        beam,
        cluster_log.gather(1, beam),
        edge_labels,
        edge_log,
        wanted,
        n_labels=N_LABELS,
        shortlist_size=90,
    )
    logits = label_logits(embedding, weight, bias, expansion.labels)
    scores = path_log(cluster_log, edge_log, beam, expansion.paths)
    loss = shortlist_bce(logits, scores, expansion.labels, wanted, N_LABELS)
    loss.backward()
    tables = (words.grad, clusters.grad, edges.grad, weight.grad, bias.grad)
    parts = (loss.detach(), *(part.to_dense() for part in tables))
    return [expansion.labels, expansion.wanted_paths, *parts, *every_label_step(embedding, wanted)]


def every_label_step(embedding, wanted):
    """The loss over every label, its gradient of φ, and the classifiers that it updates."""
    embedding = embedding.detach().requires_grad_()
    weight, bias, states = torch.randn(700, WIDTH), torch.randn(700), torch.zeros(2, 700, WIDTH)
    rates = AdamWRates(0.1, 0.9, 0.999, 1e-8, 0.01)

    def update(rows, gradient, _):
        adamw_dense(weight[rows], *states[:, rows], gradient, step=1, rates=rates)

    inputs = (embedding, weight, bias, wanted, 0.5, update)
    loss = in_chunks(50, every_label_loss, *inputs)
    loss.backward()
    return loss.detach(), embedding.grad, weight, *states


def test_a_step_has_the_same_bits_with_one_thread_and_with_two():
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one core")
    before, torch_before = numba.get_num_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    results = []
    try:
        for n_threads in (1, 2):
            numba.set_num_threads(n_threads)
            results.append(step())
    finally:
        numba.set_num_threads(before)
        torch.set_num_threads(torch_before)

    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert all(part.abs().sum() > 0 for part in results[0])
