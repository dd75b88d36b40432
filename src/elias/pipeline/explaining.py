"""Why a text gets its labels: the clusters on the way to each, and every factor of its score."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from elias.errors import DataError
from elias.model.inference import embed_all
from elias.model.one_vs_all import OneVsAll
from elias.model.paths import Traced, strongest_labels, trace
from elias.pipeline.resources import memory_explained, threads_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from elias.data.tokens import Tokens
    from elias.model.elias import EliasModel
    from elias.predictions import Predictions
    from elias.rerank.reranker import RankedScores

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
    with threads_shared(), memory_explained("predicting"):
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
