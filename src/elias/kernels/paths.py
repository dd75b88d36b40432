"""The scores of edges and of paths where the index's gradients are collected (on a GPU)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels.gradients import IndexGradients


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
    from elias.kernels import triton_paths

    return triton_paths.edge_log(edge_logits, edge_labels, n_labels=n_labels, beta=beta, beam=beam)


def path_log(
    cluster_log: Float[Tensor, "B C"],
    edge_scores: Float[Tensor, "C E"],
    beam: Int[Tensor, "B b"],
    paths: Int[Tensor, "B S"],
    gradients: IndexGradients | None = None,
) -> Float[Tensor, "B S"]:
    """Return log ŝ_c + log ŝ_{c,ℓ} of paths, 0 for a path of -1; by Triton.

    Scores come before their min(1, ·), which is taken here. The clusters get their gradient, the
    edges theirs in ``gradients`` if there is one to keep it.
    """
    scores: Tensor = _PathLog.apply(  # type: ignore[no-untyped-call]
        cluster_log, edge_scores, beam, paths, gradients
    )
    return scores


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
        from elias.kernels import triton_paths

        ctx.save_for_backward(cluster_log, edge_scores, beam, paths)
        ctx.gradients = gradients
        return triton_paths.path_log(cluster_log, edge_scores, beam, paths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from elias.kernels import triton_paths

        cluster_log, edge_scores, beam, paths = ctx.saved_tensors
        held: IndexGradients | None = ctx.gradients
        by_edge = None if held is None else held.by_edge
        touched = None if held is None else held.touched
        by_cluster = triton_paths.path_log_backward(
            grads[0], cluster_log, edge_scores, beam, paths, by_edge, touched
        )
        return by_cluster, None, None, None, None
