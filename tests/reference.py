"""The paper, dense and slow: loops over points, clusters and labels in float64, nothing clever."""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Everything behind the embedding φ. ``edge_logits`` None: the fixed graph of stage 1."""

    cluster_weight: Tensor  # ŵ_c, (C, D)
    cluster_bias: Tensor
    label_weight: Tensor  # w_ℓ, (L, D)
    label_bias: Tensor
    edge_labels: list[list[int]]  # the labels stored under each cluster
    edge_logits: list[Tensor] | None  # a_{c,ℓ} beside them
    alpha: float
    beta: float


def cluster_budgets(weights, embedding):
    """α · softmax_c(ŵ_c·φ + bias_c), which min(1, ·) makes the scores ŝ_c of Eq. 1; (B, C)."""
    logits = embedding @ weights.cluster_weight.T + weights.cluster_bias
    exponentials = torch.exp(logits)
    return weights.alpha * exponentials / exponentials.sum(dim=1, keepdim=True)


def edge_budgets(weights):
    """β · softmax over the stored edges of c, before the min(1, ·) of Eq. 5; dicts by label."""
    budgets = []
    for cluster, labels in enumerate(weights.edge_labels):
        if weights.edge_logits is None:
            values = torch.ones(len(labels), dtype=torch.float64)
        else:
            exponentials = torch.exp(weights.edge_logits[cluster])
            values = weights.beta * exponentials / exponentials.sum()
        budgets.append(dict(zip(labels, values, strict=True)))
    return budgets


def beam(scores, size, parents=()):
    """The parents of the positives (training only), then the best clusters; Eq. 2–4."""
    forced = sorted(set(parents))
    others = sorted(set(range(len(scores))) - set(forced), key=lambda c: (-scores[c].item(), c))
    return (forced + others)[:size]


def strongest_parent(weights, label):
    """The cluster with the largest share for the label (before min), the first of equal ones."""
    best, parent = -math.inf, len(weights.edge_labels)
    for cluster, labels in enumerate(weights.edge_labels):
        if label in labels:
            shares = torch.softmax(weights.edge_logits[cluster], dim=0)
            share = shares[labels.index(label)].item()
            if share > best:
                best, parent = share, cluster
    return parent


def path_scores(budgets, edges, clusters):
    """ŷ_ℓ, the best ŝ_c · ŝ_{c,ℓ} over the beam, Eq. 6, and the order of the labels reached.

    Of equal scores the one with the larger product of budgets goes first, then the lower id.
    """
    best, order = {}, {}
    for cluster in clusters:
        for label, edge in edges[cluster].items():
            score = budgets[cluster].clamp(max=1) * edge.clamp(max=1)
            key = (-score.item(), -(budgets[cluster] * edge).item(), label)
            if label not in best or key < order[label]:
                best[label], order[label] = score, key
    return {label: best[label] for label in sorted(best, key=order.get)}


def shortlist(reached, size):
    """The K labels of highest ŷ."""
    return list(reached)[:size]


def rank(weights, embedding, beam_size, shortlist_size, top_k):
    """The k best (label, p = σ(w_ℓ·φ + bias_ℓ)·ŷ_ℓ) of each point, equal ones by id."""
    edges, answers = edge_budgets(weights), []
    for point, scores in zip(embedding, cluster_budgets(weights, embedding), strict=True):
        reached = path_scores(scores, edges, beam(scores, beam_size))
        p = {label: probability(weights, point, label, reached[label]) for label in reached}
        selected = shortlist(reached, shortlist_size)
        best = sorted(selected, key=lambda label: (-p[label].item(), label))[:top_k]
        answers.append([(label, p[label].item()) for label in best])
    return answers


def probability(weights, point, label, path_score):
    """p_ℓ = σ(w_ℓ·φ + bias_ℓ) · ŷ_ℓ."""
    logit = weights.label_weight[label] @ point + weights.label_bias[label]
    return path_score / (1 + torch.exp(-logit))


def losses(weights, embedding, positives, parents, sizes, *, mean):
    """(L_c, L_s), Eq. 7 corrected and Eq. 8; sizes = (clusters searched, K), lists per point."""
    (n_clusters, size), edges = sizes, edge_budgets(weights)
    classification = shortlisted = torch.zeros((), dtype=torch.float64)
    for i, scores in enumerate(cluster_budgets(weights, embedding)):
        reached = path_scores(scores, edges, beam(scores, n_clusters, parents[i]))
        for label in shortlist(reached, size):
            p = probability(weights, embedding[i], label, reached[label])
            classification = classification + cross_entropy(p, label in positives[i])
        for label in positives[i]:
            if label in reached:
                shortlisted = shortlisted - torch.log(reached[label])
    slots = (size, max(1, *map(len, positives))) if mean else (1, 1)
    return classification / len(positives) / slots[0], shortlisted / len(positives) / slots[1]


def cross_entropy(p, relevant):
    """−[y log p + (1−y) log(1−p)]."""
    return -torch.log(p) if relevant else -torch.log(1 - p)


def attention(query, key, value, bounds):
    """Return the attention of each token and head (N, H, d) over the tokens of the same text."""
    result = torch.zeros_like(value)
    for start, end in itertools.pairwise(bounds):
        for i in range(start, end):
            for head in range(query.shape[1]):
                scores = key[start:end, head] @ query[i, head] / query.shape[2] ** 0.5
                result[i, head] = scores.softmax(dim=0) @ value[start:end, head]
    return result


def adamw(weight, gradients, lrs, betas, eps, decay):
    """AdamW over all rows; a {row: gradient} and a learning rate for each step.

    A row that is missing has a gradient of zero, and momentum does not move it in that step.
    """
    weight, mean, variance = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, (by_row, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        for row in range(len(weight)):
            gradient = by_row.get(row, torch.zeros_like(weight[row]))
            mean[row] = betas[0] * mean[row] + (1 - betas[0]) * gradient
            variance[row] = betas[1] * variance[row] + (1 - betas[1]) * gradient**2
            weight[row] *= 1 - lr * decay
            if row in by_row:
                corrected = variance[row] / (1 - betas[1] ** step)
                weight[row] -= lr * mean[row] / (1 - betas[0] ** step) / (corrected.sqrt() + eps)
    return weight


def edge_counts(beams, scores, labels, n_clusters, n_labels):
    """A' = MᵀY, Eq. 9: a point gives its cluster's score to each of its labels."""
    counts = torch.zeros(n_clusters, n_labels, dtype=torch.float64)
    for clusters, values, own in zip(beams, scores, labels, strict=True):
        for cluster, score in zip(clusters, values, strict=True):
            for label in own:
                counts[cluster, label] += float(score)
    return counts


def is_balanced(assignment, n_clusters):
    """Return whether every label has a cluster and cluster sizes differ by one at most."""
    sizes = [list(assignment).count(cluster) for cluster in range(n_clusters)]
    return sum(sizes) == len(assignment) and max(sizes) - min(sizes) <= 1
