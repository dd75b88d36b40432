"""The scores of edges and of paths: by Triton on a GPU, by compiled loops on a CPU."""

from __future__ import annotations

from typing import Any

import numba
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from elias.kernels.cpu import paths as cpu_paths
from elias.kernels.rows import IndexGradients


def edge_log(
    edge_logits: Float[Tensor, "C E"],
    edge_labels: Int[Tensor, "C E"],
    *,
    n_labels: int,
    beta: float,
    beam: Int[Tensor, "B b"] | None = None,
) -> Float[Tensor, "C E"]:
    """Return log(β · softmax_ℓ(a_c)), -inf where no edge is stored; without gradient, by Triton.

    With a ``beam`` the scores of clusters outside it may be left undefined.
    """
    from elias.kernels.gpu import paths as gpu_paths

    return gpu_paths.edge_log(edge_logits, edge_labels, n_labels=n_labels, beta=beta, beam=beam)


def path_log(
    cluster_log: Float[Tensor, "B C"],
    edge_scores: Float[Tensor, "C E"],
    beam: Int[Tensor, "B b"],
    paths: Int[Tensor, "B S"],
    gradients: IndexGradients | None = None,
) -> Float[Tensor, "B S"]:
    """Return log ŝ_c + log ŝ_{c,ℓ} of paths, 0 for a path of -1; by Triton, or on a CPU compiled.

    Scores come before their min(1, ·), which is taken here. The clusters get their gradient. On a
    CPU the edges get theirs too, on a GPU in ``gradients`` if there is one to keep it.
    """
    if not cluster_log.is_cuda and gradients is None:
        found: Tensor = _PathLogCompiled.apply(  # type: ignore[no-untyped-call]
            cluster_log, edge_scores, beam, paths
        )
        return found
    scores: Tensor = _PathLog.apply(  # type: ignore[no-untyped-call]
        cluster_log, edge_scores, beam, paths, gradients
    )
    return scores


def is_member(
    labels: Int[Tensor, "B K"], wanted: Int[Tensor, "B Y"], n_labels: int
) -> Bool[Tensor, "B K"]:
    """Say which of the labels are among the row's wanted ones (ascending, padded with L)."""
    if not labels.is_cuda:
        found = torch.empty(labels.shape, dtype=torch.bool)
        n_chunks = min(numba.get_num_threads(), max(1, len(labels)))
        cpu_paths.is_member(labels.numpy(), wanted.numpy(), n_labels, n_chunks, found.numpy())
        return found
    place = torch.searchsorted(wanted, labels).clamp(max=wanted.shape[1] - 1)
    return (wanted.gather(1, place) == labels) & (labels < n_labels)


class _PathLogCompiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cluster_log: Tensor, edge_scores: Tensor, beam: Tensor, paths: Tensor
    ) -> Tensor:
        out = torch.empty(paths.shape)
        arrays = (cluster_log.numpy(), edge_scores.numpy(), beam.numpy(), paths.numpy())
        cpu_paths.path_log(*arrays, out.numpy())
        ctx.save_for_backward(cluster_log, edge_scores, beam, paths)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        cluster_log, edge_scores, beam, paths = ctx.saved_tensors
        by_cluster = torch.zeros_like(cluster_log)
        with_edges = ctx.needs_input_grad[1]
        n_blocks = cpu_paths.n_blocks(paths.numel(), edge_scores.numel())
        blocks = torch.zeros((n_blocks, *(edge_scores if with_edges else edge_scores[:0]).shape))
        cpu_paths.path_log_backward(
            (cluster_log.numpy(), edge_scores.numpy()),
            beam.numpy(),
            paths.numpy(),
            grads[0].contiguous().numpy(),
            by_cluster.numpy(),
            blocks.numpy(),
        )
        if not with_edges:
            return by_cluster, None, None, None
        by_edge = torch.empty_like(edge_scores)
        cpu_paths.add_blocks(blocks.numpy(), by_edge.numpy())
        return by_cluster, by_edge, None, None


class _PathLog(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cluster_log: Tensor,
        edge_scores: Tensor,
        beam: Tensor,
        paths: Tensor,
        gradients: IndexGradients | None,
    ) -> Tensor:
        from elias.kernels.gpu import paths as gpu_paths

        ctx.save_for_backward(cluster_log, edge_scores, beam, paths)
        ctx.gradients = gradients
        return gpu_paths.path_log(cluster_log, edge_scores, beam, paths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from elias.kernels.gpu import paths as gpu_paths

        cluster_log, edge_scores, beam, paths = ctx.saved_tensors
        held: IndexGradients | None = ctx.gradients
        by_edge = None if held is None else held.by_edge
        touched = None if held is None else held.touched
        by_cluster = gpu_paths.path_log_backward(
            grads[0], cluster_log, edge_scores, beam, paths, by_edge, touched
        )
        return by_cluster, None, None, None, None
