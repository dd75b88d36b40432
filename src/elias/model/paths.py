"""How a search came to a label: every path that leads there, and what a cluster is about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from elias.kernels import label_logits
from elias.kernels.ranking import log_probabilities
from elias.model.elias import EliasModel


class Traced(NamedTuple):
    """The paths to k labels of each text, the best of a label first: the one that won (Eq. 6).

    A slot without a path holds the cluster C and scores of 0.
    """

    clusters: Int[Tensor, "B k P"]
    cluster_scores: Float[Tensor, "B k P"]
    """ŝ_c, Eq. 1."""
    edge_scores: Float[Tensor, "B k P"]
    """ŝ_{c,ℓ}, Eq. 5."""
    path_scores: Float[Tensor, "B k P"]
    """ŝ_c · ŝ_{c,ℓ}; of the first path this is ŷ_ℓ, Eq. 6."""
    n_paths: Int[Tensor, "B k"]
    """How many paths lead to the label, kept or not."""
    classifier: Float[Tensor, "B k"]
    """σ(w_ℓ·φ + bias_ℓ)."""
    p: Float[Tensor, "B k"]
    """σ(w_ℓ·φ + bias_ℓ)·ŷ_ℓ, just as `EliasModel.rank` has it; 0 for a label not reached."""


@torch.no_grad()
def trace(
    model: EliasModel,
    embedding: Float[Tensor, "B D"],
    labels: Int[Tensor, "B k"],
    *,
    beam_size: int,
    n_paths: int,
) -> Traced:
    """Return the ``n_paths`` best paths by which a search of this beam reaches each label.

    ``labels`` may be padded with L. Paths are ordered as the search orders them: by score, equal
    ones by what they were before the min(1, ·), then by the rank of their cluster.
    """
    n_clusters = model.graph.n_clusters
    cluster_log = model.unsaturated_log(embedding)
    best = cluster_log.topk(min(beam_size, n_clusters), dim=1)
    cluster_free = best.values.unsqueeze(1)  # (B, 1, b)
    edge_free = _edges_to(model, best.indices, labels)  # (B, k, b)
    path_log = cluster_free.clamp(max=0) + edge_free.clamp(max=0)
    reached = edge_free > -math.inf

    order = (cluster_free + edge_free).argsort(dim=2, descending=True, stable=True)
    again = path_log.gather(2, order).argsort(dim=2, descending=True, stable=True)
    order = order.gather(2, again)[:, :, :n_paths]

    kept = reached.gather(2, order)
    clusters = best.indices.unsqueeze(1).expand_as(edge_free).gather(2, order)
    in_order = cluster_free.expand_as(edge_free).gather(2, order).clamp(max=0)
    weight = model.labels.weight.float()  # one-vs-all may hold fewer bits
    logits = label_logits(embedding, weight, model.labels.bias, labels).float()
    log_p = log_probabilities(logits, path_log.amax(dim=2))
    return Traced(
        clusters=clusters.masked_fill(~kept, n_clusters),
        cluster_scores=in_order.exp().masked_fill(~kept, 0),
        edge_scores=edge_free.gather(2, order).clamp(max=0).exp(),
        path_scores=path_log.gather(2, order).exp(),
        n_paths=reached.sum(dim=2),
        classifier=logits.sigmoid(),
        p=log_p.exp(),
    )


def _edges_to(model: EliasModel, beam: Tensor, labels: Tensor) -> Tensor:
    """Return log(β·softmax) of the edge from each cluster of the beam to each label (B, k, b)."""
    edge_log = model.graph.unsaturated_log()
    rows = []
    for clusters, wanted in zip(beam, labels, strict=True):  # B·k·b·E at once would be large
        same = model.graph.edge_labels[clusters] == wanted[:, None, None]  # (k, b, E)
        same &= (wanted < model.n_labels)[:, None, None]
        rows.append(edge_log[clusters].masked_fill(~same, -math.inf).amax(dim=2))
    return torch.stack(rows) if rows else edge_log.new_empty((*labels.shape, beam.shape[1]))


@torch.no_grad()
def strongest_labels(model: EliasModel, clusters: Sequence[int], count: int) -> list[list[int]]:
    """Return the labels with the strongest edges of each cluster: what it is about.

    By ŝ_{c,ℓ} (Eq. 5). Many edges share its highest value, 1, and on a fixed graph all do: of
    equal ones the label goes first whose classifier points most along the cluster's own.
    """
    edge_log = model.graph.edge_log_scores()
    found = []
    for cluster in clusters:
        slots = model.graph.edge_labels[cluster]
        stored = slots < model.n_labels
        labels = slots[stored]
        directions = nn.functional.normalize(model.labels.weight[labels].float(), dim=1)
        order = (directions @ model.clusters.weight[cluster].float()).argsort(descending=True)
        by_edge = edge_log[cluster][stored][order].argsort(descending=True, stable=True)
        found.append(labels[order[by_edge][:count]].tolist())
    return found
