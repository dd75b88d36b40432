"""Explain predictions, and browse the learned graph.

An explanation shows the clusters through which each label was found, and the factors of its score.
It can also show the effect of each word, measured by leaving the word out of the text (occlusion),
and the exact weights of the text's n-grams in the ranker, which is linear.
`labels_of_cluster` and `clusters_of_label` show the graph. `LabelSearch` finds labels by
name or synonym.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import issparse
from torch import Tensor, nn

from elias.errors import ConfigError, DataError, check_positive
from elias.inference.predict import SearchOptions, predict, ranker_candidates, tokenize
from elias.kernels import label_logits, log_probabilities
from elias.kernels.device import explain_out_of_memory, limit_threads
from elias.labels import LabelTable
from elias.metrics import EVALUATED
from elias.model.elias import EliasModel
from elias.model.one_vs_all import OneVsAll
from elias.predictions import Candidates
from elias.text.vectorizer import word_spans, words_of

if TYPE_CHECKING:
    from elias.inference.predictor import Elias
    from elias.rerank.added_labels import AddedLabels
    from elias.rerank.reranker import Reranker
    from elias.rerank.sparse_ranker import Array, Inputs
    from elias.text.tokens import Tokens


N_DESCRIBING = 5
"""Number of labels shown to describe a cluster."""
MAX_PIECES = 200
"""Maximum number of words, or groups of consecutive words, that are left out of a text."""
N_TERMS = 20
"""Maximum number of terms of the ranker that are shown for a label."""
_MAX_CHARACTERS = 2_000_000  # total length of all variants of a text
_MAX_ROWS = 4096  # number of label classifiers that are copied at a time


class LabelPaths(NamedTuple):
    """The best paths to each of k labels of each text, best first.

    The first path determines the score of its label (Eq. 6). A slot without a path has cluster C
    and scores of 0.
    """

    clusters: Int[Tensor, "B k P"]
    cluster_scores: Float[Tensor, "B k P"]
    """Scores ŝ_c of the clusters (Eq. 1)."""
    edge_scores: Float[Tensor, "B k P"]
    """Scores ŝ_{c,ℓ} of the edges from the clusters to the label (Eq. 5)."""
    path_scores: Float[Tensor, "B k P"]
    """Scores ŝ_c · ŝ_{c,ℓ} of the paths. The first one is the score ŷ_ℓ of the label (Eq. 6)."""
    n_paths: Int[Tensor, "B k"]
    """Number of all paths from the beam to the label, not only the best P."""
    classifier: Float[Tensor, "B k"]
    """Scores σ(w_ℓ·φ + bias_ℓ) of the labels' classifiers."""
    p: Float[Tensor, "B k"]
    """Classifier score times ŷ_ℓ, as in `EliasModel.rank`, or 0 if no path leads to the label."""


@torch.no_grad()
def trace(
    model: EliasModel,
    embedding: Float[Tensor, "B D"],
    labels: Int[Tensor, "B k"],
    *,
    beam_size: int,
    n_paths: int,
) -> LabelPaths:
    """Return the ``n_paths`` best paths by which a search with ``beam_size`` reaches each label.

    ``labels`` may be padded with L. Paths are sorted by score, as in the search. Ties are broken by
    the score before min(1, ·), then by the rank of the cluster in the beam.
    """
    n_clusters = model.graph.n_clusters
    cluster_log = model.unsaturated_log(embedding)
    best = cluster_log.topk(min(beam_size, n_clusters), dim=1)
    raw_cluster = best.values.unsqueeze(1)  # (B, 1, b) log scores before min(1, ·)
    raw_edge = _edges_to(model, best.indices, labels)  # (B, k, b)
    path_log = raw_cluster.clamp(max=0) + raw_edge.clamp(max=0)
    reached = raw_edge > -math.inf

    order = (raw_cluster + raw_edge).argsort(dim=2, descending=True, stable=True)
    by_score = path_log.gather(2, order).argsort(dim=2, descending=True, stable=True)
    order = order.gather(2, by_score)[:, :, :n_paths]

    is_path = reached.gather(2, order)
    clusters = best.indices.unsqueeze(1).expand_as(raw_edge).gather(2, order)
    in_order = raw_cluster.expand_as(raw_edge).gather(2, order).clamp(max=0)
    weight = model.labels.weight.float()  # one-vs-all weights may be bfloat16
    logits = label_logits(embedding, weight, model.labels.bias, labels).float()
    log_p = log_probabilities(logits, path_log.amax(dim=2))
    return LabelPaths(
        clusters=clusters.masked_fill(~is_path, n_clusters),
        cluster_scores=in_order.exp().masked_fill(~is_path, 0),
        edge_scores=raw_edge.gather(2, order).clamp(max=0).exp(),
        path_scores=path_log.gather(2, order).exp(),
        n_paths=reached.sum(dim=2),
        classifier=logits.sigmoid(),
        p=log_p.exp(),
    )


def _edges_to(model: EliasModel, beam: Tensor, labels: Tensor) -> Tensor:
    """Return the log scores before min(1, ·) of the edges from the beam to the labels (B, k, b)."""
    edge_log = model.graph.unsaturated_log()
    rows = []
    for clusters, wanted in zip(beam, labels, strict=True):  # one text at a time, to limit memory
        same = model.graph.edge_labels[clusters] == wanted[:, None, None]  # (k, b, E)
        same &= (wanted < model.n_labels)[:, None, None]
        rows.append(edge_log[clusters].masked_fill(~same, -math.inf).amax(dim=2))
    return torch.stack(rows) if rows else edge_log.new_empty((*labels.shape, beam.shape[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPath:
    """A path from a text through a cluster to a label."""

    cluster: int
    """Id of the cluster, a key of `Explanation.clusters`."""
    cluster_score: float
    """ŝ_c, how well the text fits the cluster (Eq. 1)."""
    edge_score: float
    """ŝ_{c,ℓ}, how strongly the cluster is linked to the label (Eq. 5)."""
    score: float
    """Score of the path: cluster score times edge score."""
    won: bool
    """True for the best path, which determines the score of the label (Eq. 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordEffect:
    """The effect of a word on a label, measured by leaving the word out (occlusion)."""

    start: int
    end: int
    """The word is ``text[start:end]``. In a long text, this is a group of consecutive words."""
    effect: float
    """The score of the label minus its score in the text without the word. It is positive if the
    word supports the label."""
    probability: float | None = None
    """Probability of the label without the word, or None if the model has no probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerTerm:
    """A word or n-gram of the text and its exact contribution to the ranker's score of a label."""

    term: str
    weight: float
    """w̄_{ℓ,j}·ψ_j(x), plus the contributions of character n-grams in the word. If the ranker uses
    no embeddings, the weights of all terms and a bias sum to its margin w̄_ℓ·ψ(x)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLabel:
    """A predicted label and the factors of its score."""

    id: int
    label: str
    """Name of the label."""
    added: bool = False
    """True for an added label that was scored by its text instead of the index. It has no paths
    and no ranker score. ``p`` is the probability computed from its similarity to the text and the
    coverage of its name; ``classifier_score`` is computed from the similarity alone."""
    uri: str | None = None
    """Id or URI of the label in the user's vocabulary, or None if the model does not know it."""
    synonyms: tuple[str, ...] = ()
    """Other names of the label that the model knows."""
    description: str | None = None
    """The description of the label, or None if the model does not know it."""
    score: float
    """The score by which `Elias.predict` ranks the label."""
    probability: float | None = None
    """The probability that the label is relevant, or None if the model has no probabilities."""
    p: float
    """σ(w_ℓ·φ + bias_ℓ)·ŷ_ℓ, the score of the search. It is 0 if the label became a candidate of
    the ranker only by its name."""
    classifier_score: float
    """σ(w_ℓ·φ + bias_ℓ), the score of the label's classifier."""
    path_score: float
    """ŷ_ℓ, the score of the best path (Eq. 6)."""
    ranker_score: float | None = None
    """q^γ, where q is the score of the sparse ranker (§3.5), or None without a ranker."""
    calibrated_score: float | None = None
    """T, the calibrated score computed from p and q, or None without a calibration."""
    name_likeness: float | None = None
    """Cosine similarity of text and label name, or None if the calibration does not use names."""
    name_coverage: float | None = None
    """Share of the label name that occurs in the text, or None if the calibration does not use
    names."""
    paths: tuple[LabelPath, ...]
    """The best paths, best first."""
    n_paths: int
    """Number of paths through which the search found the label."""
    words: tuple[WordEffect, ...] = ()
    """The effect of each word, in the order of the text, if requested."""
    terms: tuple[RankerTerm, ...] = ()
    """The terms with the largest weights in the ranker, if requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explained labels of one text, best first, and the clusters on their paths."""

    text: str | None
    """The text, or None if the input was a feature vector."""
    labels: tuple[ExplainedLabel, ...]
    clusters: Mapping[int, tuple[str, ...]]
    """For each cluster on one of the paths, the names of its strongest labels."""

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as a JSON-compatible dictionary."""
        labels = [asdict(label) for label in self.labels]
        clusters = [{"id": i, "labels": list(names)} for i, names in self.clusters.items()]
        return {"text": self.text, "labels": labels, "clusters": clusters}


def word_effects(elias: Elias, text: str, labels: Sequence[int]) -> list[tuple[WordEffect, ...]]:
    """Return the effect of each word of a text on each label, by occlusion.

    The whole model predicts the text without each word in turn, so this works with every encoder
    and component. A label that is not among the best 100 has a score of 0.
    """
    spans = word_spans(text)
    count = max(1, min(MAX_PIECES, _MAX_CHARACTERS // max(1, len(text))))
    size = -(-len(spans) // count)  # words that are left out together
    pieces = [(spans[i][0], spans[i : i + size][-1][1]) for i in range(0, len(spans), max(1, size))]
    variants = [text, *(f"{text[:start]} {text[end:]}" for start, end in pieces)]
    predictions = elias.predict(variants, top_k=EVALUATED)
    effects = []
    for label in labels:
        is_label = predictions.ids == label
        scores = np.where(is_label, predictions.scores, 0).sum(axis=1)
        probabilities: Sequence[float | None] = [None] * len(pieces)
        if predictions.probabilities is not None:
            probabilities = (is_label * predictions.probabilities).sum(axis=1)[1:].tolist()
        columns = zip(pieces, (scores[0] - scores[1:]).tolist(), probabilities, strict=True)
        effects.append(
            tuple(
                WordEffect(start=start, end=end, effect=effect, probability=probability)
                for (start, end), effect, probability in columns
            )
        )
    return effects


def ranker_terms(
    reranker: Reranker | None, text: str, labels: Sequence[int], count: int = N_TERMS
) -> list[tuple[RankerTerm, ...]]:
    """Return the ``count`` terms of a text with the largest absolute weights for each label.

    The weight of a character n-gram is divided among the words in which it occurs.
    """
    featurizer = None if reranker is None else reranker.features.featurizer
    if reranker is None or featurizer is None:
        return [()] * len(labels)
    psi, n_words = reranker.features.transform([text]), len(featurizer.words)
    in_text = words_of(text, symbols=featurizer.reads_symbols)
    starts, ids = featurizer.feature_ids([word] for word in in_text)
    ids_of_words = [ids[start:end] for start, end in pairwise(starts)]
    n_occurrences = np.bincount(ids, minlength=featurizer.n_features)
    terms: list[tuple[RankerTerm, ...]] = []
    weights = reranker.ranker.weights[psi.indices]  # (features of the text, L)
    for label in labels:
        if label >= reranker.ranker.n_labels:  # an added label has no weights
            terms.append(())
            continue
        columns, products = psi.indices, psi.data * weights[:, label].toarray().ravel()
        n_known = np.searchsorted(columns, n_words)  # columns of character n-grams come last
        shares: defaultdict[str, float] = defaultdict(float)
        for column, product in zip(columns[:n_known], products[:n_known], strict=True):
            shares[featurizer.words[column]] = float(product)
        share_of_ngram = np.zeros(featurizer.n_features)
        share_of_ngram[columns[n_known:]] = products[n_known:] / n_occurrences[columns[n_known:]]
        for word, ids_of_word in zip(in_text, ids_of_words, strict=True):
            shares[word] += float(share_of_ngram[ids_of_word].sum())
        best = sorted(shares.items(), key=lambda share: -abs(share[1]))[:count]
        terms.append(tuple(RankerTerm(term=term, weight=weight) for term, weight in best if weight))
    return terms


def explain(
    elias: Elias, inputs: Inputs, *, top_k: int, paths: int, member: int, words: bool = False
) -> list[Explanation]:
    """Explain the predicted labels of texts by the paths in one member. See `Elias.explain`."""
    check_positive(top_k=top_k, paths=paths)
    if not 0 <= member < len(elias.members):
        n_members = len(elias.members)
        raise ConfigError(
            f"there is no member {member}; member indices go from 0 to {n_members - 1}"
        )
    if not issparse(inputs):
        inputs = list(inputs)
    if words and issparse(inputs):
        raise DataError("word effects need texts, but these are features; leave out words=True")
    explained = elias.members[member]
    model, tokens = explained.model, tokenize(inputs, explained.model.encoder)

    def tokens_of(member: Elias) -> Tokens:
        return tokens if member.model is model else tokenize(inputs, member.model.encoder)

    last, options = elias.components[-1], SearchOptions(top_k, embed=True)
    searched: dict[EliasModel, Candidates] = {}
    predictions = predict(elias, inputs, [last], options, tokens_of, searched)[last]
    candidates = searched[model]
    phi = candidates.embedding
    assert phi is not None
    with limit_threads(), explain_out_of_memory("predicting"):
        device, beam_size = model.labels.weight.device, explained.sizes.beam_size
        embedding = torch.from_numpy(phi).to(device)
        labels = torch.from_numpy(np.ascontiguousarray(predictions.ids)).to(device)
        traced = trace(model, embedding, labels, beam_size=beam_size, n_paths=paths)
    traced = LabelPaths(*(part.cpu() for part in traced))
    if isinstance(model, OneVsAll):  # scores all labels without paths
        traced = traced._replace(n_paths=torch.zeros_like(traced.n_paths))
    factors: dict[str, Array] = {}
    if explained.reranker is not None:
        if explained.reranker.n_proposed:
            ids = candidates.ids[:, None, : explained.config.rerank.candidates]
            is_candidate = (predictions.ids[:, :, None] == ids).any(axis=2)
            traced = _keep_candidate_paths(traced, is_candidate)
        predicted = Candidates(predictions.ids, traced.p.numpy(), phi)
        predicted = ranker_candidates(explained, predicted, tokens)
        factors = explained.reranker.factors(predicted, inputs)

    @cache
    def describe(cluster: int) -> tuple[str, ...]:
        edges = labels_of_cluster(model, cluster, N_DESCRIBING)
        return tuple(predictions.name(edge.id) for edge in edges)

    added: dict[tuple[int, int], dict[str, Any]] = {}  # factors of added labels
    if explained.added is not None:
        added = _added_factors(explained.added, predictions.ids, traced.p.numpy(), phi, inputs)
    explanations, table = [], elias.label_table
    for row, ranking in enumerate(predictions):
        values = {
            "score": ranking.scores,
            "probability": ranking.probabilities,
            "p": traced.p[row],
            "classifier_score": traced.classifier[row],
            "path_score": traced.path_scores[row, :, 0],
            **{name: factor[row] for name, factor in factors.items()},
        }
        text, ids = None if issparse(inputs) else inputs[row], ranking.ids.tolist()
        effects: list[tuple[WordEffect, ...]] = [()] * len(ids)
        terms: list[tuple[RankerTerm, ...]] = [()] * len(ids)
        if words and text is not None:
            effects = word_effects(elias, text, ids)
            terms = ranker_terms(explained.reranker, text, ids)
        shown = tuple(
            ExplainedLabel(
                id=ids[i],
                label=label,
                uri=predictions.uri(ids[i]),
                synonyms=table.about(ids[i])[0],
                description=table.about(ids[i])[1],
                **{name: float(array[i]) for name, array in values.items() if array is not None}
                | added.get((row, ids[i]), {}),
                paths=() if (row, ids[i]) in added else _paths(traced, row, i),
                n_paths=0 if (row, ids[i]) in added else int(traced.n_paths[row, i]),
                words=effects[i],
                terms=terms[i],
            )
            for i, label in enumerate(ranking.labels)
        )
        used = dict.fromkeys(path.cluster for label in shown for path in label.paths)
        clusters = {cluster: describe(cluster) for cluster in used}
        explanations.append(Explanation(text=text, labels=shown, clusters=clusters))
    return explanations


def _added_factors(
    added: AddedLabels, ids: Array, index_p: Array, embedding: Array, inputs: Inputs
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the factors of each added label, by row and label. See `ExplainedLabel.added`."""
    texts = inputs if isinstance(inputs, Sequence) else None
    p, dense = (added.probabilities(embedding, part) for part in (texts, None))
    coverage = None if texts is None else added.coverage(texts)
    factors = {}
    for row, label in zip(*np.nonzero(np.isin(ids, added.labels)), strict=True):
        # a label with several vectors has the factors of the best one
        rows = np.flatnonzero(added.labels == ids[row, label])
        best = rows[p[row, rows].argmax()]
        if p[row, best] < index_p[row, label]:
            continue  # the index gave the label a higher score
        factors[int(row), int(ids[row, label])] = {
            "added": True,
            "p": float(p[row, best]),
            "classifier_score": float(dense[row, best]),
            "path_score": 0.0,
            "ranker_score": None,
            "calibrated_score": None,
            "name_likeness": None,
            "name_coverage": None if coverage is None else float(coverage[row, best]),
        }
    return factors


def _keep_candidate_paths(traced: LabelPaths, is_candidate: Array) -> LabelPaths:
    """Remove the paths and the scores p of labels (B, k) that are not candidates of the search."""
    other = torch.from_numpy(~is_candidate)
    return traced._replace(
        path_scores=traced.path_scores.masked_fill(other.unsqueeze(2), 0),
        n_paths=traced.n_paths.masked_fill(other, 0),
        p=traced.p.masked_fill(other, 0),
    )


def _paths(traced: LabelPaths, row: int, label: int) -> tuple[LabelPath, ...]:
    """Return the paths from a text to one of its labels."""
    columns = (traced.clusters, traced.cluster_scores, traced.edge_scores, traced.path_scores)
    count = int(traced.n_paths[row, label])
    paths = zip(*(column[row, label, :count].tolist() for column in columns), strict=True)
    return tuple(
        LabelPath(cluster=c, cluster_score=s, edge_score=e, score=score, won=i == 0)
        for i, (c, s, e, score) in enumerate(paths)
    )


# --- browse the graph ---


class Edge(NamedTuple):
    """An edge of the graph: the id of the neighbour and the edge score ŝ_{c,ℓ} (Eq. 5)."""

    id: int
    score: float


@torch.no_grad()
def labels_of_cluster(model: EliasModel, cluster: int, count: int | None = None) -> list[Edge]:
    """Return the labels of a cluster, or only the first ``count``, strongest edge first.

    Equally strong edges are sorted by similarity, the dot product of the cluster classifier and the
    normalised label classifier, so that the first labels show the topic of the cluster.
    """
    is_edge = model.graph.edge_labels[cluster] < model.n_labels
    labels = model.graph.edge_labels[cluster][is_edge]
    center = model.clusters.weight[cluster].float()
    similarity = [
        nn.functional.normalize(model.labels.weight[some].float(), dim=1) @ center
        for some in torch.split(labels, _MAX_ROWS)
    ]
    logs = model.graph.unsaturated_log()[cluster][is_edge]
    return _sorted(labels, logs, torch.cat(similarity), count)


@torch.no_grad()
def clusters_of_label(model: EliasModel, label: int) -> list[Edge]:
    """Return the clusters of a label, strongest edge first. A label outside the graph has none."""
    if label >= model.n_labels:
        return []
    clusters, slots = (model.graph.edge_labels == label).nonzero(as_tuple=True)
    direction = nn.functional.normalize(model.labels.weight[label].float(), dim=0)
    similarity = model.clusters.weight[clusters].float() @ direction
    return _sorted(clusters, model.graph.unsaturated_log()[clusters, slots], similarity)


def _sorted(ids: Tensor, logs: Tensor, similarity: Tensor, count: int | None = None) -> list[Edge]:
    """Return the ``count`` best edges to clusters or labels, given log scores before min(1, ·)."""
    nodes, scores, similar = (
        tensor.cpu().numpy() for tensor in (ids, logs.clamp(max=0).exp(), similarity)
    )
    order = np.lexsort((nodes, -similar, -scores))[:count]
    return list(map(Edge, nodes[order].tolist(), scores[order].tolist()))


class LabelSearch:
    """Label search by words in names and synonyms.

    >>> LabelSearch(["salt fish", "fish", "law", "shellfish"]).find("fish", 3)
    [1, 0, 3]
    """

    def __init__(self, labels: Sequence[str]) -> None:
        rows = LabelTable.of(labels).rows()
        self._names = [
            [form.casefold() for form in (name, *synonyms)] for name, _, synonyms, *_ in rows
        ]

    def find(self, query: str, count: int) -> list[int]:
        """Return the ids of up to ``count`` labels with a name that contains every word of a query.

        Names equal to the query come first, then names that start with the query, then names with
        a word that starts with the first word of the query, then all others. Within each group,
        shorter names come first. A synonym counts as a name.
        """
        words = query.casefold().split()
        if not words:
            return list(range(min(count, len(self._names))))
        phrase = " ".join(words)
        word_start = re.compile(rf"\b{re.escape(words[0])}")

        def rank(name: str) -> tuple[bool, bool, bool, int]:
            starts = name.startswith(phrase)
            in_name = starts or word_start.search(name) is not None
            return name != phrase, not starts, not in_name, len(name)

        ranks = {
            label: min(map(rank, matching))
            for label, names in enumerate(self._names)
            if (matching := [name for name in names if all(word in name for word in words)])
        }
        return sorted(ranks, key=lambda label: (ranks[label], label))[:count]
