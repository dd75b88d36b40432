"""Scores of edges and paths and their gradients as Triton kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language import constexpr, tensor

from elias.kernels.adamw_state import IndexGradients

_BLOCK = 1024


def edge_log(
    edge_logits: Float[Tensor, "C E"],
    edge_labels: Int[Tensor, "C E"],
    *,
    n_labels: int,
    beta: float,
    beam: Int[Tensor, "B b"] | None = None,
) -> Float[Tensor, "C E"]:
    """Return the unsaturated log score of each edge, log(β · softmax_ℓ(a_c)), without a gradient.

    Slots without an edge give -inf. If ``beam`` is given, the scores of clusters outside it are
    undefined.
    """
    n_clusters, n_edges = edge_logits.shape
    clusters = beam.contiguous() if beam is not None and beam.numel() < n_clusters else None
    out = torch.empty((n_clusters, n_edges), dtype=torch.float32, device=edge_logits.device)
    block = triton.next_power_of_2(n_edges)
    n_programs = n_clusters if clusters is None else clusters.numel()
    if n_programs:
        _edge_log[(n_programs,)](
            edge_logits.detach(),
            edge_labels,
            edge_labels if clusters is None else clusters,
            out,
            n_clusters,
            n_edges,
            n_labels,
            math.log(beta),
            PICKED=clusters is not None,
            BLOCK_E=block,
            num_warps=8 if block > 2048 else 4,
        )
    return out


class _PathLog(torch.autograd.Function):
    """Autograd function of the path scores log ŝ_c + log ŝ_{c,ℓ}. A path id of -1 gives 0.

    The backward pass adds the gradient of ``edge_log`` to ``gradients``. If ``gradients`` is None,
    there is no backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cluster_log: Tensor,
        edge_log: Tensor,
        beam: Tensor,
        paths: Tensor,
        gradients: IndexGradients | None = None,
    ) -> Tensor:
        ctx.save_for_backward(cluster_log, edge_log, beam, paths)
        ctx.gradients = gradients
        n_rows, n_slots = paths.shape
        out = torch.empty((n_rows, n_slots), dtype=torch.float32, device=paths.device)
        if out.numel():
            _path_log[(n_rows, triton.cdiv(n_slots, _BLOCK))](
                cluster_log.contiguous(),
                edge_log,
                beam.contiguous(),
                paths.contiguous(),
                out,
                cluster_log.shape[1],
                beam.shape[1],
                edge_log.shape[1],
                n_slots,
                BLOCK=_BLOCK,
                num_warps=4,
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cluster_log, edge_log, beam, paths = ctx.saved_tensors
        by_edge, touched = ctx.gradients.by_edge, ctx.gradients.touched
        by_cluster = path_log_backward(
            grads[0], cluster_log, edge_log, beam, paths, by_edge, touched
        )
        return by_cluster, None, None, None, None


path_log = _PathLog.apply


def path_log_backward(
    gradient: Float[Tensor, "B S"],
    cluster_log: Float[Tensor, "B C"],
    edge_log: Float[Tensor, "C E"],
    beam: Int[Tensor, "B b"],
    paths: Int[Tensor, "B S"],
    by_edge: Float[Tensor, "C E"] | None,
    touched: Int[Tensor, " C"] | None,
) -> Float[Tensor, "B C"]:
    """Return the gradient of ``cluster_log`` and add the gradient of ``edge_log`` to ``by_edge``.

    The gradient is zero where min(1, ·) is constant. ``touched`` is set to 1 for each cluster on a
    path. ``by_edge`` and ``touched`` are None if the edges are fixed.
    """
    n_rows, n_slots = paths.shape
    n_beam = beam.shape[1]
    by_cluster = torch.zeros_like(cluster_log, memory_format=torch.contiguous_format)
    block_b = triton.next_power_of_2(n_beam)
    if paths.numel():
        _path_log_backward[(n_rows,)](
            gradient.contiguous(),
            cluster_log.contiguous(),
            edge_log,
            beam.contiguous(),
            paths.contiguous(),
            by_cluster,
            by_cluster if by_edge is None else by_edge,
            beam if touched is None else touched,
            cluster_log.shape[1],
            n_beam,
            edge_log.shape[1],
            n_slots,
            LEARNED=by_edge is not None,
            BLOCK_B=block_b,
            BLOCK=max(16, min(256, 8192 // block_b)),
            num_warps=4,
        )
    return by_cluster


@triton.jit
def _edge_log(
    edge_logits: tensor,
    edge_labels: tensor,
    beam: tensor,
    out: tensor,
    n_clusters: tensor,
    n_edges: tensor,
    n_labels: tensor,
    log_beta: tensor,
    PICKED: constexpr,
    BLOCK_E: constexpr,
) -> None:
    cluster = tl.program_id(0).to(tl.int64)
    if PICKED:  # a cluster in several beams is written several times, with the same scores
        cluster = tl.load(beam + cluster).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    inside = (e < n_edges) & (cluster < n_clusters)  # C marks an empty slot of the beam
    at = cluster * n_edges + e
    label = tl.load(edge_labels + at, mask=inside, other=n_labels)
    stored = label < n_labels
    logits = tl.load(edge_logits + at, mask=stored, other=-float("inf"))
    highest = tl.max(logits, axis=0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)  # the cluster has no edges
    total = tl.sum(tl.exp(logits - highest), axis=0)
    scores = log_beta + (logits - highest - tl.log(total))
    tl.store(out + at, tl.where(stored, scores, -float("inf")), mask=inside)


@triton.jit(do_not_specialize=["n_beam", "n_slots"])
def _path_log(
    cluster_log: tensor,
    edge_log: tensor,
    beam: tensor,
    paths: tensor,
    out: tensor,
    n_clusters: tensor,
    n_beam: tensor,
    n_edges: tensor,
    n_slots: tensor,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    path = tl.load(paths + row * n_slots + slot, mask=slot < n_slots, other=-1)
    valid = path >= 0
    position = path // n_edges
    cluster = tl.load(beam + row * n_beam + position, mask=valid, other=0).to(tl.int64)
    edge = path - position * n_edges
    by_cluster = tl.load(cluster_log + row * n_clusters + cluster, mask=valid, other=0.0)
    by_edge = tl.load(edge_log + cluster * n_edges + edge, mask=valid, other=0.0)
    score = tl.minimum(by_cluster, 0.0) + tl.minimum(by_edge, 0.0)
    tl.store(out + row * n_slots + slot, tl.where(valid, score, 0.0), mask=slot < n_slots)


@triton.jit(do_not_specialize=["n_beam", "n_slots"])
def _path_log_backward(
    gradient: tensor,
    cluster_log: tensor,
    edge_log: tensor,
    beam: tensor,
    paths: tensor,
    by_cluster: tensor,
    by_edge: tensor,
    touched: tensor,
    n_clusters: tensor,
    n_beam: tensor,
    n_edges: tensor,
    n_slots: tensor,
    LEARNED: constexpr,
    BLOCK_B: constexpr,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    spot = tl.arange(0, BLOCK_B)
    sums = tl.zeros([BLOCK_B], tl.float32)  # a row has few clusters, so no atomics are needed
    hits = tl.zeros([BLOCK_B], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        path = tl.load(paths + row * n_slots + slot, mask=slot < n_slots, other=-1)
        valid = path >= 0
        g = tl.load(gradient + row * n_slots + slot, mask=valid, other=0.0)
        position = path // n_edges
        cluster = tl.load(beam + row * n_beam + position, mask=valid, other=0).to(tl.int64)
        edge = cluster * n_edges + (path - position * n_edges)
        if LEARNED:
            score = tl.load(edge_log + edge, mask=valid, other=1.0)
            tl.atomic_add(by_edge + edge, g, mask=valid & (score <= 0.0), sem="relaxed")
        here = valid[:, None] & (position[:, None] == spot[None, :])
        sums += tl.sum(tl.where(here, g[:, None], 0.0), axis=0)
        hits += tl.sum(here.to(tl.int32), axis=0)
    cluster = tl.load(beam + row * n_beam + spot, mask=spot < n_beam, other=n_clusters)
    known = cluster < n_clusters
    at = row * n_clusters + cluster
    score = tl.load(cluster_log + at, mask=known, other=1.0)
    tl.atomic_add(by_cluster + at, sums, mask=known & (score <= 0.0), sem="relaxed")
    if LEARNED:
        tl.store(touched + cluster, hits * 0 + 1, mask=known & (hits > 0))
