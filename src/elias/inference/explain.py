"""Explain a prediction: the clusters and score factors of each label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import issparse
from torch import Tensor, nn

from elias.errors import DataError
from elias.inference.predict import add_embedding
from elias.kernels import label_logits, log_probabilities
from elias.kernels.device import explain_out_of_memory, limit_threads
from elias.model.elias import EliasModel
from elias.model.one_vs_all import OneVsAll
from elias.model.search import embed_all
from elias.predictions import Candidates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from elias.inference.predictor import Elias
    from elias.predictions import Predictions
    from elias.rerank.sparse_ranker import Inputs
    from elias.text.tokens import Tokens


class LabelPaths(NamedTuple):
    """The best paths to each of k labels of each text, best first.

    The first path determines the score of its label (Eq. 6). A slot without a path holds the
    cluster C and scores of 0.
    """

    clusters: Int[Tensor, "B k P"]
    cluster_scores: Float[Tensor, "B k P"]
    """ŝ_c, Eq. 1."""
    edge_scores: Float[Tensor, "B k P"]
    """ŝ_{c,ℓ}, Eq. 5."""
    path_scores: Float[Tensor, "B k P"]
    """ŝ_c · ŝ_{c,ℓ}; the score of the first path is ŷ_ℓ, Eq. 6."""
    n_paths: Int[Tensor, "B k"]
    """Number of all paths from the beam to the label, including those beyond the best P."""
    classifier: Float[Tensor, "B k"]
    """σ(w_ℓ·φ + bias_ℓ)."""
    p: Float[Tensor, "B k"]
    """σ(w_ℓ·φ + bias_ℓ)·ŷ_ℓ, as in `EliasModel.rank`; 0 for a label that is not reached."""


@torch.no_grad()
def trace(
    model: EliasModel,
    embedding: Float[Tensor, "B D"],
    labels: Int[Tensor, "B k"],
    *,
    beam_size: int,
    n_paths: int,
) -> LabelPaths:
    """Return the ``n_paths`` best paths by which a search with this beam reaches each label.

    ``labels`` may be padded with L. Paths are sorted by score, as in the search. Ties are broken by
    the score before min(1, ·), then by the rank of the cluster in the beam.
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

    is_path = reached.gather(2, order)
    clusters = best.indices.unsqueeze(1).expand_as(edge_free).gather(2, order)
    in_order = cluster_free.expand_as(edge_free).gather(2, order).clamp(max=0)
    weight = model.labels.weight.float()  # one-vs-all may be stored in bfloat16
    logits = label_logits(embedding, weight, model.labels.bias, labels).float()
    log_p = log_probabilities(logits, path_log.amax(dim=2))
    return LabelPaths(
        clusters=clusters.masked_fill(~is_path, n_clusters),
        cluster_scores=in_order.exp().masked_fill(~is_path, 0),
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
    """Return the ``count`` labels with the strongest edges of each cluster, to describe it.

    Labels are sorted by ŝ_{c,ℓ} (Eq. 5). Many edges have the maximum score of 1; in a fixed graph
    all edges do. Ties are broken by the cosine similarity of the label's and the cluster's
    classifier.
    """
    edge_log = model.graph.edge_log_scores()
    strongest = []
    for cluster in clusters:
        slots = model.graph.edge_labels[cluster]
        stored = slots < model.n_labels
        labels = slots[stored]
        directions = nn.functional.normalize(model.labels.weight[labels].float(), dim=1)
        order = (directions @ model.clusters.weight[cluster].float()).argsort(descending=True)
        by_edge = edge_log[cluster][stored][order].argsort(descending=True, stable=True)
        strongest.append(labels[order[by_edge][:count]].tolist())
    return strongest


N_DESCRIBING = 5
"""Number of labels that describe a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPath:
    """One path to a label through a cluster."""

    cluster: int
    """c, a key of `Explanation.clusters`."""
    cluster_score: float
    """ŝ_c, how well the text fits the cluster (Eq. 1)."""
    edge_score: float
    """ŝ_{c,ℓ}, how strongly the cluster is linked to the label (Eq. 5)."""
    score: float
    """ŝ_c · ŝ_{c,ℓ}."""
    won: bool
    """True for the best path, which determines the score of the label (Eq. 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLabel:
    """A predicted label and the factors of its score."""

    id: int
    label: str
    """Name of the label."""
    score: float
    """The score by which `Elias.predict` ranks the label."""
    probability: float | None = None
    """The probability that the label is relevant; None if the model has no probabilities."""
    p: float
    """σ(w_ℓ·φ + bias_ℓ)·ŷ_ℓ, the score of the search."""
    classifier_score: float
    """σ(w_ℓ·φ + bias_ℓ), the score of the label's classifier."""
    path_score: float
    """ŷ_ℓ, the score of the best path (Eq. 6)."""
    ranker_score: float | None = None
    """q^γ, from the score q of the sparse ranker (§3.5); None without a ranker."""
    calibrated_score: float | None = None
    """T, the calibration of p and q; None without a calibration."""
    name_likeness: float | None = None
    """Cosine similarity of text and label name, an input of T; None if T reads no names."""
    name_coverage: float | None = None
    """Share of the label name that occurs in the text; None if T reads no names."""
    paths: tuple[LabelPath, ...]
    """The best paths, best first."""
    n_paths: int
    """Number of paths to the label that the search found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The labels of one text, best first, with the clusters on their paths."""

    text: str | None
    """The text; None if features were given."""
    labels: tuple[ExplainedLabel, ...]
    clusters: Mapping[int, tuple[str, ...]]
    """Names of the strongest labels of each cluster that is on one of the paths."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        labels = [asdict(label) for label in self.labels]
        clusters = [{"id": i, "labels": list(names)} for i, names in self.clusters.items()]
        return {"text": self.text, "labels": labels, "clusters": clusters}


def explain(
    member: Elias, inputs: Inputs, tokens: Tokens, predictions: Predictions, *, paths: int
) -> list[Explanation]:
    """Explain predicted labels by the search and the ranker of one member.

    Args:
        member: The model, or a member of an ensemble.
        inputs: The texts, or features, that were predicted.
        tokens: The inputs as tokens of the member's encoder.
        predictions: The labels to explain.
        paths: Maximum number of paths returned for each label.
    """
    if not isinstance(paths, int) or paths < 1:
        raise DataError(f"paths must be a whole number >= 1, not {paths!r}")
    model = member.model
    with limit_threads(), explain_out_of_memory("predicting"):
        embedding = torch.from_numpy(embed_all(model.encoder, tokens))
        labels = torch.from_numpy(np.ascontiguousarray(predictions.ids))
        device = model.labels.weight.device
        traced = trace(
            model,
            embedding.to(device),
            labels.to(device),
            beam_size=member.sizes.beam_size,
            n_paths=paths,
        )
    traced = LabelPaths(*(part.cpu() for part in traced))
    if isinstance(model, OneVsAll):  # all labels are scored: no path leads to them
        traced = traced._replace(n_paths=torch.zeros_like(traced.n_paths))
    factors: dict[str, NDArray[np.float32]] = {}
    if member.reranker is not None:
        candidates = Candidates(predictions.ids, traced.p.numpy())
        if member.config.rerank.embedding != "none":
            candidates = add_embedding(member, candidates, tokens)
        factors = member.reranker.factors(candidates, inputs)
    on_paths = [c for c in torch.unique(traced.clusters).tolist() if c < model.graph.n_clusters]
    strongest = strongest_labels(model, on_paths, N_DESCRIBING)
    names = {
        cluster: tuple(map(predictions.name, labels))
        for cluster, labels in zip(on_paths, strongest, strict=True)
    }
    explanations = []
    for row, ranking in enumerate(predictions):
        of_row = LabelPaths(*(part[row] for part in traced))
        explained = tuple(
            ExplainedLabel(
                id=int(ranking.ids[i]),
                label=label,
                score=float(ranking.scores[i]),
                probability=(
                    None if ranking.probabilities is None else float(ranking.probabilities[i])
                ),
                p=float(of_row.p[i]),
                classifier_score=float(of_row.classifier[i]),
                path_score=float(of_row.path_scores[i, 0]),
                **{name: float(values[row, i]) for name, values in factors.items()},
                paths=_paths(of_row, i),
                n_paths=int(of_row.n_paths[i]),
            )
            for i, label in enumerate(ranking.labels)
        )
        used = dict.fromkeys(path.cluster for label in explained for path in label.paths)
        text = None if issparse(inputs) else inputs[row]
        clusters = {cluster: names[cluster] for cluster in used}
        explanations.append(Explanation(text=text, labels=explained, clusters=clusters))
    return explanations


def _paths(traced: LabelPaths, label: int) -> tuple[LabelPath, ...]:
    """Return the paths to one label; ``traced`` holds the paths of a single text."""
    columns = (traced.clusters, traced.cluster_scores, traced.edge_scores, traced.path_scores)
    rows = zip(*(column[label].tolist() for column in columns), strict=True)
    count = min(int(traced.n_paths[label]), traced.clusters.shape[1])
    return tuple(
        LabelPath(cluster=c, cluster_score=s, edge_score=e, score=score, won=i == 0)
        for i, (c, s, e, score) in enumerate(rows)
        if i < count
    )
