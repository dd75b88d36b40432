"""Explain a prediction: the clusters and score factors of each label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from elias.errors import DataError
from elias.kernels import label_logits, log_probabilities
from elias.kernels.device import explain_out_of_memory, limit_threads
from elias.model.batch_inference import embed_all
from elias.model.elias import EliasModel
from elias.model.one_vs_all import OneVsAll

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from elias.predictions import Predictions
    from elias.rerank.reranker import RankedScores
    from elias.text.tokens import Tokens


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


Judge: TypeAlias = "Callable[[NDArray[np.int64], NDArray[np.float32]], RankedScores]"
"""Tells what a ranker says of labels (N, k), given them and the model's p of each."""
N_DESCRIBING = 5
"""Labels that describe a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPath:
    """One way from the root over a cluster to a label."""

    cluster: int
    """c, a key of `Explanation.clusters`."""
    cluster_score: float
    """ŝ_c, how well the text fits the cluster (Eq. 1)."""
    edge_score: float
    """ŝ_{c,ℓ}, how firmly the label hangs under the cluster (Eq. 5)."""
    score: float
    """ŝ_c · ŝ_{c,ℓ}."""
    won: bool
    """Whether this is the best path, the one that counts (Eq. 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLabel:
    """A predicted label, and what its score is made of."""

    id: int
    label: str
    """Its name."""
    score: float
    """What `Elias.predict` ranks it by."""
    probability: float | None = None
    """How probable it is that the label is relevant; None where the model does not know."""
    p: float
    """σ(w_ℓ·φ + bias_ℓ)·ŷ_ℓ, the score of the searched model."""
    classifier_score: float
    """σ(w_ℓ·φ + bias_ℓ), what the label's own classifier says."""
    path_score: float
    """ŷ_ℓ, the score of the best path (Eq. 6)."""
    ranker_score: float | None = None
    """q, what the sparse ranker says (§3.5), to its power γ; None where the model has none."""
    calibrated_score: float | None = None
    """T, what the calibration makes of p and q; None where the model has none."""
    name_likeness: float | None = None
    """How alike text and name are, which T was told too; None where it was not."""
    name_coverage: float | None = None
    """How much of the name stands in the text, likewise."""
    paths: tuple[LabelPath, ...]
    """The best paths, best first."""
    n_paths: int
    """How many paths the search found to the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The labels of one text, best first, with the clusters that led to them."""

    text: str | None
    """The text; None where features were given."""
    labels: tuple[ExplainedLabel, ...]
    clusters: Mapping[int, tuple[str, ...]]
    """The names of the strongest labels of every cluster on one of the paths."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them."""
        labels = [asdict(label) for label in self.labels]
        clusters = [{"id": i, "labels": list(names)} for i, names in self.clusters.items()]
        return {"text": self.text, "labels": labels, "clusters": clusters}


def explain(
    model: EliasModel,
    tokens: Tokens,
    predictions: Predictions,
    *,
    texts: Sequence[str] | None,
    beam_size: int,
    paths: int,
    judge: Judge | None = None,
) -> list[Explanation]:
    """Return how a search of this beam comes to the labels that were predicted for each text.

    ``judge`` says what the ranker makes of them, where the model has one.
    """
    if not isinstance(paths, int) or paths < 1:
        raise DataError(f"paths must be a whole number >= 1, not {paths!r}")
    traced = _trace(model, tokens, predictions, beam_size, paths)
    if isinstance(model, OneVsAll):  # no way leads to a label: all are scored
        traced = traced._replace(n_paths=torch.zeros_like(traced.n_paths))
    said = None if judge is None else judge(predictions.ids, traced.p.numpy())
    used = [c for c in torch.unique(traced.clusters).tolist() if c < model.graph.n_clusters]
    strongest = strongest_labels(model, used, N_DESCRIBING)
    about = {
        cluster: tuple(map(predictions.name, labels))
        for cluster, labels in zip(used, strongest, strict=True)
    }
    return [
        _explanation(
            predictions,
            Traced(*(part[row] for part in traced)),
            row,
            None if texts is None else texts[row],
            about,
            {} if said is None else _of_row(said, row),
        )
        for row in range(len(predictions))
    ]


def _trace(
    model: EliasModel, tokens: Tokens, predictions: Predictions, beam_size: int, n_paths: int
) -> Traced:
    with limit_threads(), explain_out_of_memory("predicting"):
        embedding = torch.from_numpy(embed_all(model.encoder, tokens))
        labels = torch.from_numpy(np.ascontiguousarray(predictions.ids))
        device = model.labels.weight.device
        traced = trace(
            model, embedding.to(device), labels.to(device), beam_size=beam_size, n_paths=n_paths
        )
    return Traced(*(part.cpu() for part in traced))


def _explanation(
    predictions: Predictions,
    of_row: Traced,
    row: int,
    text: str | None,
    about: Mapping[int, tuple[str, ...]],
    said: Mapping[str, list[float]],
) -> Explanation:
    ranking = predictions[row]
    labels = tuple(
        ExplainedLabel(
            id=int(label_id),
            label=name,
            score=float(score),
            probability=None if ranking.probabilities is None else float(ranking.probabilities[i]),
            p=float(of_row.p[i]),
            classifier_score=float(of_row.classifier[i]),
            path_score=float(of_row.path_scores[i, 0]),
            **{name: values[i] for name, values in said.items()},
            paths=_paths(of_row, i),
            n_paths=int(of_row.n_paths[i]),
        )
        for i, (label_id, name, score) in enumerate(
            zip(ranking.ids, ranking.labels, ranking.scores, strict=True)
        )
    )
    used = dict.fromkeys(path.cluster for label in labels for path in label.paths)
    return Explanation(text=text, labels=labels, clusters={c: about[c] for c in used})


def _of_row(said: RankedScores, row: int) -> dict[str, list[float]]:
    """Return what the ranker says of one text's labels, by fields of `ExplainedLabel`."""
    found = {"ranker_score": said.relevance}
    if said.probability is not None:
        found["calibrated_score"] = said.probability
    if said.nearness is not None:
        found["name_likeness"] = said.nearness.likeness
        found["name_coverage"] = said.nearness.coverage
    return {name: values[row].tolist() for name, values in found.items()}


def _paths(traced: Traced, label: int) -> tuple[LabelPath, ...]:
    """Return the paths to one label; ``traced`` is of one text."""
    columns = (traced.clusters, traced.cluster_scores, traced.edge_scores, traced.path_scores)
    rows = zip(*(column[label].tolist() for column in columns), strict=True)
    count = min(int(traced.n_paths[label]), traced.clusters.shape[1])
    return tuple(
        LabelPath(cluster=c, cluster_score=s, edge_score=e, score=score, won=place == 0)
        for place, (c, s, e, score) in enumerate(rows)
        if place < count
    )
