"""Plain torch implementation of the operations of `elias.kernels`, for GPUs without Triton.

The functions have the same names and arguments as in `elias.kernels.cpu` and `elias.kernels.gpu`.
Gradients come from autograd unless stated otherwise. `elias.kernels.gpu` also uses `bag_sum`,
`log_probabilities`, `every_label_bce`, `adamw_dense` and, for long texts, `packed_attention` from
this module.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import (
    embedding_bag,
    logsigmoid,
    pad,
    scaled_dot_product_attention,
    softplus,
)

from elias.kernels.adamw_state import AdamWRates, stochastic_round

_LOWEST = -(2**63)
_LAST_ID = 2**31 - 1
_MAX_DENSE_LOGITS = 2**30  # up to this many B·L logits, one dense product is faster than gathering
_MAX_GATHERED = 2**27  # with more logits, this number of weights is gathered at a time
_MAX_EXPONENT = 80.0  # keeps exp finite in float32


def sortable(scores: Float[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """Map float32 values to 32-bit integers that sort in the same order, stored as int64."""
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def ranking_key(scores: Float[Tensor, "B K"], labels: Int[Tensor, "*B K"]) -> Int[Tensor, "B K"]:
    """Return integers that are larger for higher scores and, among ties, for lower label ids."""
    return (sortable(scores) << 32) + (_LAST_ID - labels)


def split_ranking_key(
    keys: Int[Tensor, "B K"],
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """Invert `ranking_key`: return the labels and scores."""
    high = keys >> 32
    size = high.abs().to(torch.int32).view(torch.float32)
    return _LAST_ID - (keys & 0xFFFFFFFF), torch.where(high < 0, -size, size)


def expand_beam(
    beam: Tensor,
    beam_log: Tensor,
    edge_labels: Tensor,
    edge_log: Tensor,
    wanted: Tensor,
    n_labels: int,
    shortlist_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `elias.kernels.Expansion`: labels, paths and wanted paths."""
    n_clusters = len(edge_labels)
    inside = (beam < n_clusters).unsqueeze(-1)
    clusters = beam.clamp(max=n_clusters - 1)
    cluster_part, edge_part = beam_log.detach().float().unsqueeze(-1), edge_log.float()[clusters]
    unsaturated = (cluster_part + edge_part).masked_fill(~inside, -torch.inf).flatten(1)  # (B, P)
    scores = (cluster_part.clamp(max=0) + edge_part.clamp(max=0)).flatten(1)
    labels = edge_labels[clusters].flatten(1).masked_fill(unsaturated == -torch.inf, n_labels)
    n_paths = unsaturated.shape[1]

    # The best path to a label is the one with the highest score. Ties are broken by the higher
    # unsaturated score (one 64-bit key holds both), then by the lower path id.
    key = (sortable(scores) << 32) + (sortable(unsaturated) + 2**31)
    path_ids = torch.arange(n_paths, device=beam.device).expand_as(key)
    best = torch.full((len(beam), n_labels + 1), _LOWEST, device=beam.device)
    best.scatter_reduce_(1, labels, key, "amax")
    first = torch.full_like(best, n_paths)
    candidates = path_ids.masked_fill(key != best.gather(1, labels), n_paths)
    first.scatter_reduce_(1, labels, candidates, "amin")
    first[:, n_labels] = n_paths
    wins = path_ids == first.gather(1, labels)

    # Choose the labels with a key above the K-th, then labels with the K-th key by label id.
    full_size = min(shortlist_size, n_labels)
    size = min(full_size, n_paths)
    choice = key.masked_fill(~wins, _LOWEST)
    last = choice.topk(size, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    tied = torch.where(wins & (choice == last), n_labels - labels, _LOWEST)
    order = torch.where(choice > last, 2**40 + path_ids, tied)
    chosen, paths = order.topk(size, dim=1, sorted=False)
    empty = chosen == _LOWEST
    padding = (0, full_size - size)
    wanted_paths = first.gather(1, wanted.clamp(max=n_labels))
    return (
        pad(labels.gather(1, paths).masked_fill(empty, n_labels), padding, value=n_labels),
        pad(paths.masked_fill(empty, 0), padding, value=0),
        wanted_paths.masked_fill(wanted_paths == n_paths, -1),
    )


def log_shares(
    edge_logits: Tensor, empty: Tensor, removed_log: Tensor | None = None
) -> Float[Tensor, "C E"]:
    """Return log softmax_ℓ(a_c), the log share of each stored edge in its cluster.

    The softmax is over stored and removed edges. ``empty`` slots give -inf.
    """
    logits = edge_logits.float().masked_fill(empty, -torch.inf)
    shares = logits.log_softmax(dim=-1)
    if removed_log is not None:
        stored_share = logsigmoid(logits.logsumexp(dim=-1) - removed_log)
        shares = shares + stored_share.unsqueeze(-1)
    return shares.masked_fill(empty, -torch.inf)


def path_log(cluster_log: Tensor, edge_log: Tensor, beam: Tensor, paths: Tensor) -> Tensor:
    """Return the log score of each path, log ŝ_c + log ŝ_{c,ℓ}. A path id of -1 gives 0."""
    n_edges = edge_log.shape[1]
    valid, paths = paths >= 0, paths.clamp(min=0)
    cluster = beam.gather(1, paths // n_edges)
    edge = edge_log[cluster, paths % n_edges]
    scores = cluster_log.gather(1, cluster).clamp(max=0) + edge.clamp(max=0)
    return torch.where(valid, scores, torch.zeros((), device=edge.device))


def label_logits(embedding: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """Return the logit w_ℓ·φ + bias_ℓ of each label. Padded slots give 0."""
    n_labels = len(weight)
    known = labels.clamp(max=n_labels - 1)
    if len(embedding) * n_labels <= _MAX_DENSE_LOGITS:
        logits = torch.addmm(bias, embedding, weight.T).gather(1, known)
    else:
        rows = max(1, _MAX_GATHERED // (labels.shape[1] * weight.shape[1]))
        parts = [
            torch.einsum("bd,bkd->bk", embedding[i : i + rows], weight[known[i : i + rows]])
            for i in range(0, len(embedding), rows)
        ]
        logits = torch.cat(parts) + bias[known]
    return torch.where(labels < n_labels, logits, torch.zeros((), device=logits.device))


def bag_sum(weight: Tensor, ids: Tensor, offsets: Tensor, coefficients: Tensor) -> Tensor:
    """Return the weighted sum of vectors Σ_j coefficient_j · weight[id_j] of each bag of ids."""
    return embedding_bag(
        ids, weight, offsets, mode="sum", per_sample_weights=coefficients, include_last_offset=True
    )


def log_probabilities(logits: Tensor, log_scores: Tensor) -> Tensor:
    """Return the log probability of each label, log p = log σ(logit) + log ŷ."""
    return logsigmoid(logits) + log_scores


def shortlist_bce(
    logits: Tensor, shortlist_log: Tensor, labels: Tensor, positives: Tensor, n_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss over all shortlists and its gradients with respect to z and log ŷ.

    Everything is computed in log space, so that neither the loss nor its gradients overflow.
    """
    stored = labels < n_labels
    position = torch.searchsorted(positives, labels).clamp(max=positives.shape[1] - 1)
    relevant = (positives.gather(1, position) == labels) & stored
    log_hit, log_miss = logsigmoid(logits), logsigmoid(-logits)
    log_p = log_hit + shortlist_log
    log_rest = torch.log(-torch.expm1(shortlist_log))  # log(1−ŷ), −inf where ŷ = 1
    log_not_p = torch.logaddexp(log_miss, log_hit + log_rest)
    log_odds = log_p - log_not_p  # log(p / (1−p))
    odds = log_odds.clamp(max=_MAX_EXPONENT).exp()
    loss = torch.where(relevant, -log_p, -log_not_p)
    by_logits = torch.where(relevant, -log_miss.exp(), (log_odds + log_miss).exp())
    by_shortlist = odds.masked_fill(relevant, -1)
    loss, by_logits, by_shortlist = (
        part.masked_fill(~stored, 0) for part in (loss, by_logits, by_shortlist)
    )
    return loss.sum(), by_logits, by_shortlist


def every_label_bce(
    embedding: Tensor, weight: Tensor, bias: Tensor, positives: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the one-vs-all loss and its gradients with respect to the logits and the biases."""
    residual = torch.addmm(bias, embedding, weight.T)  # z, then scale · (σ(z) − y)
    inside = (positives >= 0) & (positives < len(weight))
    column = positives.clamp(0, len(weight) - 1)
    relevant = inside.to(residual.dtype)
    loss = softplus(residual).sum() - (residual.gather(1, column) * relevant).sum()
    residual.sigmoid_().scatter_add_(1, column, -relevant).mul_(scale)
    return loss, residual, residual.sum(dim=0)


def packed_attention(
    query: Float[Tensor, "N H d"],
    key: Float[Tensor, "N H d"],
    value: Float[Tensor, "N H d"],
    bounds: Int[Tensor, " bounds"],
    longest: int,
) -> Float[Tensor, "N H d"]:
    """Return the attention of each token over the tokens of its own text.

    On a CPU, which only tests use, attention is masked over all pairs of tokens.
    """
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo: a second

        attended: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest)
        return attended
    text = torch.searchsorted(bounds, torch.arange(len(query), dtype=bounds.dtype), right=True)
    q, k, v = (part.transpose(0, 1) for part in (query, key, value))
    same_text = text.unsqueeze(1) == text
    return scaled_dot_product_attention(q, k, v, same_text).transpose(0, 1)


def adamw_dense(
    weight: Tensor,
    mean: Tensor,
    variance: Tensor,
    gradient: Tensor,
    step: int,
    rates: AdamWRates,
) -> None:
    """Apply dense AdamW in place, computed in float32 regardless of the dtype of the tensors."""
    exact_mean = mean.float().lerp_(gradient, 1 - rates.beta1)  # in place if mean is float32
    squares = gradient.square()
    if variance.shape != gradient.shape:
        squares = squares.mean(dim=1, keepdim=True)
    variance.lerp_(squares, 1 - rates.beta2)
    size = (variance / (1 - rates.beta2**step)).sqrt_().add_(rates.eps)
    exact = weight.float().mul_(1 - rates.lr * rates.decay)
    exact.addcdiv_(exact_mean, size, value=-rates.lr / (1 - rates.beta1**step))
    if weight.dtype == torch.bfloat16:
        mean.copy_(exact_mean)
        weight.copy_(stochastic_round(exact))
