"""The scores of edges and of paths as Triton kernels, and the way back of their gradients."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 1024


def edge_log(
    edge_logits: Float[Tensor, "C E"],
    edge_labels: Int[Tensor, "C E"],
    *,
    n_labels: int,
    beta: float,
    beam: Int[Tensor, "B b"] | None = None,
) -> Float[Tensor, "C E"]:
    """Return log(β · softmax_ℓ(a_c)), -inf where no edge is stored; no gradient.

    With a ``beam`` the scores of clusters outside it may be left undefined.
    """
    n_clusters, n_edges = edge_logits.shape
    picked = beam is not None and beam.numel() < n_clusters
    out = torch.empty((n_clusters, n_edges), dtype=torch.float32, device=edge_logits.device)
    block = triton.next_power_of_2(n_edges)
    n_programs = beam.numel() if beam is not None and picked else n_clusters
    if not n_programs:
        return out
    _edge_log[(n_programs,)](
        edge_logits.detach(),
        edge_labels,
        beam.contiguous() if beam is not None and picked else edge_labels,
        out,
        n_clusters,
        n_edges,
        n_labels,
        math.log(beta),
        PICKED=picked,
        BLOCK_E=block,
        num_warps=8 if block > 2048 else 4,
    )
    return out


def path_log(
    cluster_log: Float[Tensor, "B C"],
    edge_scores: Float[Tensor, "C E"],
    beam: Int[Tensor, "B b"],
    paths: Int[Tensor, "B S"],
) -> Float[Tensor, "B S"]:
    """Return min(0, ·) of the cluster's score and of the edge's, summed; 0 for a path of -1."""
    n_rows, n_slots = paths.shape
    out = torch.empty((n_rows, n_slots), dtype=torch.float32, device=paths.device)
    if out.numel():
        _path_log[(n_rows, triton.cdiv(n_slots, _BLOCK))](
            cluster_log.contiguous(),
            edge_scores,
            beam.contiguous(),
            paths.contiguous(),
            out,
            cluster_log.shape[1],
            beam.shape[1],
            edge_scores.shape[1],
            n_slots,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


def path_log_backward(
    gradient: Float[Tensor, "B S"],
    cluster_log: Float[Tensor, "B C"],
    edge_scores: Float[Tensor, "C E"],
    beam: Int[Tensor, "B b"],
    paths: Int[Tensor, "B S"],
    by_edge: Float[Tensor, "C E"] | None,
    touched: Int[Tensor, " C"] | None,
) -> Float[Tensor, "B C"]:
    """Return the gradient by the clusters' scores; add that by the edges' to ``by_edge``.

    No gradient passes where min(0, ·) cuts. ``touched`` is set for each cluster of a path. Both
    are None where the edges are fixed.
    """
    n_rows, n_slots = paths.shape
    n_beam = beam.shape[1]
    by_cluster = torch.zeros_like(cluster_log, memory_format=torch.contiguous_format)
    block_b = triton.next_power_of_2(n_beam)
    if paths.numel():
        _path_log_backward[(n_rows,)](
            gradient.contiguous(),
            cluster_log.contiguous(),
            edge_scores,
            beam.contiguous(),
            paths.contiguous(),
            by_cluster,
            by_cluster if by_edge is None else by_edge,
            beam if touched is None else touched,
            cluster_log.shape[1],
            n_beam,
            edge_scores.shape[1],
            n_slots,
            LEARNED=by_edge is not None,
            BLOCK_B=block_b,
            BLOCK=max(16, min(256, 8192 // block_b)),
            num_warps=4,
        )
    return by_cluster


@triton.jit
def _edge_log(
    edge_logits: tl.tensor,
    edge_labels: tl.tensor,
    beam: tl.tensor,
    out: tl.tensor,
    n_clusters: tl.tensor,
    n_edges: tl.tensor,
    n_labels: tl.tensor,
    log_beta: tl.tensor,
    PICKED: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    cluster = tl.program_id(0).to(tl.int64)
    if PICKED:  # a cluster in several rows is written as often, with the same scores
        cluster = tl.load(beam + cluster).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    inside = (e < n_edges) & (cluster < n_clusters)  # an empty slot of the beam is C
    at = cluster * n_edges + e
    label = tl.load(edge_labels + at, mask=inside, other=n_labels)
    stored = label < n_labels
    logits = tl.load(edge_logits + at, mask=stored, other=-float("inf"))
    highest = tl.max(logits, axis=0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)  # a cluster without any edge
    total = tl.sum(tl.exp(logits - highest), axis=0)
    scores = log_beta + (logits - highest - tl.log(total))
    tl.store(out + at, tl.where(stored, scores, -float("inf")), mask=inside)


@triton.jit(do_not_specialize=["n_beam", "n_slots"])
def _path_log(
    cluster_log: tl.tensor,
    edge_scores: tl.tensor,
    beam: tl.tensor,
    paths: tl.tensor,
    out: tl.tensor,
    n_clusters: tl.tensor,
    n_beam: tl.tensor,
    n_edges: tl.tensor,
    n_slots: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    path = tl.load(paths + row * n_slots + slot, mask=slot < n_slots, other=-1)
    valid = path >= 0
    position = path // n_edges
    cluster = tl.load(beam + row * n_beam + position, mask=valid, other=0).to(tl.int64)
    edge = path - position * n_edges
    by_cluster = tl.load(cluster_log + row * n_clusters + cluster, mask=valid, other=0.0)
    by_edge = tl.load(edge_scores + cluster * n_edges + edge, mask=valid, other=0.0)
    score = tl.minimum(by_cluster, 0.0) + tl.minimum(by_edge, 0.0)
    tl.store(out + row * n_slots + slot, tl.where(valid, score, 0.0), mask=slot < n_slots)


@triton.jit(do_not_specialize=["n_beam", "n_slots"])
def _path_log_backward(
    gradient: tl.tensor,
    cluster_log: tl.tensor,
    edge_scores: tl.tensor,
    beam: tl.tensor,
    paths: tl.tensor,
    by_cluster: tl.tensor,
    by_edge: tl.tensor,
    touched: tl.tensor,
    n_clusters: tl.tensor,
    n_beam: tl.tensor,
    n_edges: tl.tensor,
    n_slots: tl.tensor,
    LEARNED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    spot = tl.arange(0, BLOCK_B)
    sums = tl.zeros([BLOCK_B], tl.float32)  # a row has few clusters: no need for atomics here
    hits = tl.zeros([BLOCK_B], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        path = tl.load(paths + row * n_slots + slot, mask=slot < n_slots, other=-1)
        valid = path >= 0
        g = tl.load(gradient + row * n_slots + slot, mask=valid, other=0.0)
        position = path // n_edges
        cluster = tl.load(beam + row * n_beam + position, mask=valid, other=0).to(tl.int64)
        place = cluster * n_edges + (path - position * n_edges)
        if LEARNED:
            free = tl.load(edge_scores + place, mask=valid, other=1.0)
            tl.atomic_add(by_edge + place, g, mask=valid & (free <= 0.0), sem="relaxed")
        here = valid[:, None] & (position[:, None] == spot[None, :])
        sums += tl.sum(tl.where(here, g[:, None], 0.0), axis=0)
        hits += tl.sum(here.to(tl.int32), axis=0)
    cluster = tl.load(beam + row * n_beam + spot, mask=spot < n_beam, other=n_clusters)
    known = cluster < n_clusters
    at = row * n_clusters + cluster
    own = tl.load(cluster_log + at, mask=known, other=1.0)
    tl.atomic_add(by_cluster + at, sums, mask=known & (own <= 0.0), sem="relaxed")
    if LEARNED:
        tl.store(touched + cluster, hits * 0 + 1, mask=known & (hits > 0))
