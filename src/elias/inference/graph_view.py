"""Browse the learned graph: the labels of a cluster, the clusters of a label, labels by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from elias.model.elias import EliasModel


class Edge(NamedTuple):
    """The id of the neighbour that an edge leads to, and the edge score ŝ_{c,ℓ} (Eq. 5)."""

    id: int
    score: float


class GraphView:
    """The labels of each cluster and the clusters of each label, strongest edge first.

    Equally strong edges are sorted by the similarity of the cluster's and the label's classifier,
    so that the first labels show the topic of a cluster.
    """

    def __init__(self, model: EliasModel) -> None:
        self.n_clusters = model.graph.n_clusters
        clusters, labels, scores, similarity = _edges(model)
        self._labels = _Neighbours(clusters, labels, scores, similarity, self.n_clusters)
        self._clusters = _Neighbours(labels, clusters, scores, similarity, model.n_labels)

    def n_labels_of(self, cluster: int) -> int:
        """Return the number of labels of a cluster."""
        return self._labels.count(cluster)

    def n_clusters_of(self, label: int) -> int:
        """Return the number of clusters of a label."""
        return self._clusters.count(label)

    def labels_of(self, cluster: int, count: int, start: int = 0) -> list[Edge]:
        """Return ``count`` labels of a cluster from rank ``start``, strongest first."""
        return self._labels.edges(cluster, count, start)

    def clusters_of(self, label: int, count: int, start: int = 0) -> list[Edge]:
        """Return ``count`` clusters of a label from rank ``start``, strongest first."""
        return self._clusters.edges(label, count, start)


class _Neighbours:
    """The edges of each of ``n_nodes`` nodes, strongest first."""

    def __init__(
        self,
        nodes: NDArray[np.int64],
        others: NDArray[np.int64],
        scores: NDArray[np.float32],
        similarity: NDArray[np.float32],
        n_nodes: int,
    ) -> None:
        order = np.lexsort((others, -similarity, -scores, nodes))
        self._ids = others[order].astype(np.int32)
        self._scores = scores[order]
        self._starts = np.searchsorted(nodes[order], np.arange(n_nodes + 1))

    def count(self, node: int) -> int:
        return int(self._starts[node + 1] - self._starts[node])

    def edges(self, node: int, count: int, start: int) -> list[Edge]:
        first, end = self._starts[node : node + 2]
        rows = slice(first + start, min(first + start + count, end))
        return list(map(Edge, self._ids[rows].tolist(), self._scores[rows].tolist()))


class LabelSearch:
    """Finds labels by parts of their names.

    >>> LabelSearch(["salt fish", "fish", "law", "shellfish"]).find("fish", 3)
    [1, 0, 3]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = [name.casefold() for name in names]

    def find(self, query: str, count: int) -> list[int]:
        """Return the ids of ``count`` labels whose names contain every word of the query.

        Names equal to the query come first, then names that start with the query, then names with
        a word that starts with the first word of the query, then all others. Within each group,
        shorter names come first.
        """
        words = query.casefold().split()
        if not words:
            return list(range(min(count, len(self._names))))
        phrase = " ".join(words)
        matches = [i for i, name in enumerate(self._names) if all(word in name for word in words)]
        word_start = re.compile(rf"\b{re.escape(words[0])}")

        def sort_key(label: int) -> tuple[bool, bool, bool, int, int]:
            name = self._names[label]
            starts_word = word_start.search(name) is not None
            return (
                name != phrase,
                not name.startswith(phrase),
                not (starts_word or name.startswith(phrase)),
                len(name),
                label,
            )

        return sorted(matches, key=sort_key)[:count]


@torch.no_grad()
def _edges(
    model: EliasModel,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return the cluster, label and score of every edge, and the similarity of its classifiers."""
    graph = model.graph
    scores = graph.edge_log_scores().exp()
    columns: list[list[NDArray[np.generic]]] = [[], [], [], []]
    for cluster in range(graph.n_clusters):  # all clusters at once would need C·E·D numbers
        is_edge = graph.edge_labels[cluster] < model.n_labels
        labels = graph.edge_labels[cluster][is_edge]
        directions = torch.nn.functional.normalize(model.labels.weight[labels].float(), dim=1)
        similarity = directions @ model.clusters.weight[cluster].float()
        parts = (torch.full_like(labels, cluster), labels, scores[cluster][is_edge], similarity)
        for column, part in zip(columns, parts, strict=True):
            column.append(part.cpu().numpy())
    clusters, label_ids, edge_scores, similarities = (np.concatenate(c) for c in columns)
    return clusters, label_ids, edge_scores, similarities
