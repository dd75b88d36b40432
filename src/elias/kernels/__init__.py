"""Dispatch the operations of searches and training steps to the kernels of a device.

Most functions call the function of the same name in one of three modules:

- `elias.kernels.cpu`: loops compiled by numba, for tensors on a CPU;
- `elias.kernels.gpu`: Triton kernels, for tensors on a GPU;
- `elias.kernels.plain`: plain torch, for tensors on a GPU without Triton.

Calls that pass an `IndexGradients` always run Triton kernels; the optimizer applies these gradients
with functions of `gpu_kernels`. Other calls on a GPU run plain torch if they need gradients of
edges or classifiers, because the Triton kernels do not return such gradients to autograd. Triton is
imported on first use, so importing `elias.kernels` does not require it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.errors import ConfigError
from elias.kernels import cpu, plain
from elias.kernels.adamw_state import AdamWRates
from elias.kernels.adamw_state import IndexGradients as IndexGradients
from elias.kernels.cpu import adamw_rows as adamw_rows
from elias.kernels.cpu import rank_rows as rank_rows

logger = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Return whether GPUs run Triton kernels. Call this only if there is a GPU.

    The result is False if Triton is not installed (CUDA builds of torch include it) or if the
    environment variable ``ELIAS_KERNELS`` is ``torch``. The variable is read once. It is not a
    setting of the configuration, because it should change the speed but not the trained model.

    Raises:
        ConfigError: ``ELIAS_KERNELS`` is set to an unknown value.
    """
    choice = os.environ.get("ELIAS_KERNELS", "auto")
    if choice not in ("auto", "torch"):
        raise ConfigError(
            f"environment variable ELIAS_KERNELS is {choice!r}; set it to auto or torch or unset it"
        )
    if choice == "auto" and find_spec("triton") is not None:
        return True
    reason, remedy = "ELIAS_KERNELS is torch", ""
    if choice == "auto":
        reason = "Triton is not installed"
        remedy = "; install a CUDA build of torch or the package triton"
    message = "%s: the GPU runs plain torch instead of Triton kernels, which is slower%s"
    logger.warning(message, reason, remedy)
    return False


def runs_triton(tensor: Tensor) -> bool:
    """Return whether operations on this tensor run as Triton kernels."""
    return tensor.is_cuda and has_triton()


def gpu_kernels() -> Any:
    """Return `elias.kernels.gpu`. It is imported here because Triton may not be installed."""
    from elias.kernels import gpu

    return gpu


def _kernels(tensor: Tensor, *, by_autograd: bool = False) -> Any:
    """Return the kernel module for the device of this tensor.

    Set ``by_autograd`` for an operation whose Triton kernel does not compute all gradients. While
    gradients are enabled, such an operation runs in plain torch on a GPU.
    """
    if not tensor.is_cuda:
        return cpu
    if has_triton() and not (by_autograd and torch.is_grad_enabled()):
        return gpu_kernels()
    return plain


def packed_attention(device: torch.device) -> Callable[..., Tensor]:
    """Return the function that computes attention within packed texts on a device.

    It takes queries, keys and values of all texts, one after the other (N, H, d); the bounds of
    the texts (texts + 1,); and the maximum number of their tokens. The result (N, H, d) is the
    attention of each token over the tokens of its own text.
    """
    if device.type == "cuda" and has_triton():
        attend: Callable[..., Tensor] = gpu_kernels().packed_attention
        return attend
    return plain.packed_attention


class Expansion(NamedTuple):
    """The best labels that the clusters of a beam lead to, and the best path to each of them.

    A path goes from a cluster of the beam along an edge to a label. The id of the path is
    ``position in the beam · E + edge``.
    """

    labels: Int[Tensor, "B K"]
    """The best labels, in unspecified order, padded with ``n_labels``."""
    paths: Int[Tensor, "B K"]
    """The id of the best path to each label, the lowest id if several tie; 0 for padding."""
    wanted_paths: Int[Tensor, "B Y"]
    """The id of the best path to each wanted label, shortlisted or not; -1 if there is none."""


@torch.no_grad()
def expand_beam(
    beam: Int[Tensor, "B b"],
    beam_log: Float[Tensor, "B b"],
    edge_labels: Int[Tensor, "C E"],
    edge_log: Float[Tensor, "C E"],
    wanted: Int[Tensor, "B Y"],
    *,
    n_labels: int,
    shortlist_size: int,
) -> Expansion:
    """Return the shortlist of each point: the K labels with the best paths from its beam (Eq. 4–6).

    The log score of a path is log ŝ_c + log ŝ_{c,ℓ}, the scores of its cluster and its edge.
    ``beam_log`` and ``edge_log`` are *unsaturated*: this function applies the min(1, ·) of Eq. 1
    and 5 to them. Many labels then have the score 1. Ties are broken by the higher unsaturated
    score, then by the lower label id. An edge with log score -inf counts as missing, and a beam
    slot that holds C counts as empty. ``wanted`` holds labels whose best paths are returned even if
    they are not in the shortlist. Each row of ``wanted`` is ascending and padded with L.
    """
    run = _kernels(beam).expand_beam
    return Expansion(*run(beam, beam_log, edge_labels, edge_log, wanted, n_labels, shortlist_size))


def edge_log(
    edge_logits: Float[Tensor, "C E"],
    edge_labels: Int[Tensor, "C E"],
    removed_log: Float[Tensor, " C"] | None = None,
    *,
    n_labels: int,
    beta: float,
    beam: Int[Tensor, "B b"] | None = None,
) -> Float[Tensor, "C E"]:
    """Return the unsaturated log score of each edge: log(β · softmax_ℓ(a_c)), Eq. 5 without min.

    Slots without an edge give -inf. ``removed_log`` is log Σ exp(a_{c,ℓ}) over edges that are not
    stored but are part of the softmax. If ``beam`` is given, the scores of clusters outside it may
    be undefined.
    """
    if removed_log is None and runs_triton(edge_logits) and not torch.is_grad_enabled():
        return gpu_kernels().edge_log(
            edge_logits, edge_labels, n_labels=n_labels, beta=beta, beam=beam
        )
    shares = plain.log_shares(edge_logits, edge_labels >= n_labels, removed_log)
    return math.log(beta) + shares


def path_log(
    cluster_log: Float[Tensor, "B C"],
    edge_log: Float[Tensor, "C E"],
    beam: Int[Tensor, "B b"],
    paths: Int[Tensor, "B S"],
    gradients: IndexGradients | None = None,
) -> Float[Tensor, "B S"]:
    """Return the log score of each path, log ŝ_c + log ŝ_{c,ℓ}. A path id of -1 gives 0.

    ``cluster_log`` and ``edge_log`` are log scores before min(1, ·), which is applied here. If
    ``gradients`` is given, the backward pass adds the gradient of ``edge_log`` to it instead of
    returning it to autograd.
    """
    if gradients is not None:
        return gpu_kernels().path_log(cluster_log, edge_log, beam, paths, gradients)
    return _kernels(cluster_log, by_autograd=True).path_log(cluster_log, edge_log, beam, paths)


def label_logits(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    labels: Int[Tensor, "B K"],
    gradients: IndexGradients | None = None,
) -> Float[Tensor, "B K"]:
    """Return the logits w_ℓ·φ + bias_ℓ of K labels for each point. A padded label (L) gives 0.

    If ``gradients`` is given, the backward pass adds the gradient of weights and biases to it, as
    (label, embedding) pairs, instead of returning it to autograd.
    """
    if gradients is not None:
        return gpu_kernels().label_logits(embedding, weight, bias, labels, gradients)
    return _kernels(embedding, by_autograd=True).label_logits(embedding, weight, bias, labels)


def bag_sum(
    weight: Float[Tensor, "V D"],
    ids: Int[Tensor, " tokens"],
    offsets: Int[Tensor, " B+1"],
    coefficients: Float[Tensor, " tokens"],
) -> Float[Tensor, "B D"]:
    """Return the weighted sum of vectors Σ_j coefficient_j · weight[id_j] of each bag of ids.

    The coefficients get no gradient.
    """
    return _kernels(weight).bag_sum(weight, ids, offsets, coefficients)


def log_probabilities(
    logits: Float[Tensor, "B K"], log_scores: Float[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    """Return the log probability of each label, log p = log σ(logit) + log ŷ.

    ``log_scores`` is log ŷ, the score of the label's best path. On a CPU, the results are
    bit-identical to the scores of `rank_rows`.
    """
    return _kernels(logits).log_probabilities(logits, log_scores)


def shortlist_bce(
    logits: Float[Tensor, "B K"],
    shortlist_log: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    positives: Int[Tensor, "B Y"],
    n_labels: int,
) -> Float[Tensor, ""]:
    """Return the binary cross-entropy over all shortlists, with p = σ(z)·ŷ (Eq. 7, corrected).

    It is Σ −[y log p + (1−y) log(1−p)]. ``logits`` is z and ``shortlist_log`` is log ŷ ≤ 0.
    ``positives`` is ascending in each row and padded with L; shortlist slots that hold L are
    ignored. The computation uses log p = log σ(z) + log ŷ and 1−p = σ(−z) + σ(z)(1−ŷ), which avoids
    taking the logarithm of a rounded probability. Neither the loss nor its gradients overflow.
    """
    return _ShortlistBCE.apply(logits, shortlist_log, labels, positives, n_labels)


class _ShortlistBCE(torch.autograd.Function):
    """Autograd function of `shortlist_bce`: loss and gradients in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        shortlist_log: Tensor,
        labels: Tensor,
        positives: Tensor,
        n_labels: int,
    ) -> Tensor:
        loss, by_logits, by_shortlist = _kernels(logits).shortlist_bce(
            logits.float(), shortlist_log, labels, positives, n_labels
        )
        ctx.save_for_backward(by_logits, by_shortlist)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_logits, by_shortlist = ctx.saved_tensors
        return grads[0] * by_logits, grads[0] * by_shortlist, None, None, None


@torch.no_grad()
def product(left: Float[Tensor, "n k"], right: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    """Return ``left @ right``, rounded to bfloat16 on CPUs that have instructions for it."""
    return left @ right if left.is_cuda else cpu.product(left, right)


def every_label_bce(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "n D"],
    bias: Float[Tensor, " n"],
    positives: Int[Tensor, "B Y"],
    scale: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "B n"], Float[Tensor, " n"]]:
    """Return the one-vs-all loss and its gradients with respect to the logits and the biases.

    The logits are z = w·φ + bias, for every point and every row of ``weight``. The loss is
    Σ −[y log σ(z) + (1−y) log σ(−z)], and its gradient with respect to z, multiplied by ``scale``,
    is scale · (σ(z) − y). ``positives`` holds row indices. Indices outside 0 … n−1 are ignored.
    """
    return _kernels(embedding).every_label_bce(embedding, weight, bias, positives, scale)


def adamw_dense(
    weight: Float[Tensor, "R D"],
    mean: Float[Tensor, "R D"],
    variance: Float[Tensor, "R d"],
    gradient: Float[Tensor, "R D"],
    *,
    step: int,
    rates: AdamWRates,
) -> None:
    """Apply dense AdamW in place.

    A ``variance`` of width 1 holds one second moment per row, the mean of its squared gradients.
    A bfloat16 weight is rounded stochastically, because rounding to nearest would discard updates
    smaller than half a unit in the last place. A bfloat16 first moment is rounded to nearest: each
    step replaces a fraction 1 − β₁ of it, so rounding errors do not accumulate.
    """
    _kernels(weight).adamw_dense(weight, mean, variance, gradient, step, rates)
