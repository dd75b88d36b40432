"""The learned index to walk about in: a cluster's labels, a label's clusters, labels by name."""

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
    """An edge as seen from one of its ends: what is at the other, and ŝ_{c,ℓ} (Eq. 5)."""

    id: int
    score: float


class GraphView:
    """The graph of a model as two lists of neighbours, strongest first.

    Of equally strong labels of a cluster, those come first whose classifier points most along the
    cluster's own, so that the first few say what it is about.
    """

    def __init__(self, model: EliasModel) -> None:
        self.n_clusters = model.graph.n_clusters
        clusters, labels, scores, likeness = _edges(model)
        order = np.lexsort((labels, -likeness, -scores, clusters))
        self._labels = labels[order].astype(np.int32)
        self._label_scores = scores[order]
        self._cluster_starts = np.searchsorted(clusters[order], np.arange(self.n_clusters + 1))
        order = np.lexsort((clusters, -likeness, -scores, labels))
        self._clusters = clusters[order].astype(np.int32)
        self._cluster_scores = scores[order]
        self._label_starts = np.searchsorted(labels[order], np.arange(model.n_labels + 1))

    def n_labels_of(self, cluster: int) -> int:
        """Return how many labels hang under a cluster."""
        return int(self._cluster_starts[cluster + 1] - self._cluster_starts[cluster])

    def n_clusters_of(self, label: int) -> int:
        """Return how many clusters a label hangs under."""
        return int(self._label_starts[label + 1] - self._label_starts[label])

    def labels_of(self, cluster: int, count: int, start: int = 0) -> list[Edge]:
        """Return some labels of a cluster, strongest first."""
        first, end = self._cluster_starts[cluster : cluster + 2]
        rows = slice(first + start, min(first + start + count, end))
        return _pairs(self._labels[rows], self._label_scores[rows])

    def clusters_of(self, label: int, count: int, start: int = 0) -> list[Edge]:
        """Return some clusters of a label, strongest first."""
        first, end = self._label_starts[label : label + 2]
        rows = slice(first + start, min(first + start + count, end))
        return _pairs(self._clusters[rows], self._cluster_scores[rows])


class LabelSearch:
    """Labels by a part of their name.

    >>> LabelSearch(["salt fish", "fish", "law", "shellfish"]).find("fish", 3)
    [1, 0, 3]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._folded = [name.casefold() for name in names]

    def find(self, query: str, count: int) -> list[int]:
        """Return the ids of labels that hold every word of the query.

        The whole name first, then names that begin so, then those in which a word does; of equals
        the shorter.
        """
        wanted = query.casefold().split()
        if not wanted:
            return list(range(min(count, len(self._folded))))
        whole = " ".join(wanted)
        found = [i for i, name in enumerate(self._folded) if all(word in name for word in wanted)]
        begins = re.compile(rf"\b{re.escape(wanted[0])}")

        def rank(label: int) -> tuple[int, int, int]:
            name = self._folded[label]
            if name == whole:
                place = 0
            elif name.startswith(whole):
                place = 1
            else:
                place = 2 if begins.search(name) else 3
            return place, len(name), label

        return sorted(found, key=rank)[:count]


def _pairs(ids: NDArray[np.int32], scores: NDArray[np.float32]) -> list[Edge]:
    return [Edge(*pair) for pair in zip(ids.tolist(), scores.tolist(), strict=True)]


@torch.no_grad()
def _edges(
    model: EliasModel,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return the cluster, label and score of every edge, and how alike both classifiers are."""
    graph = model.graph
    scores = graph.edge_log_scores().exp()
    columns: list[list[NDArray[np.generic]]] = [[], [], [], []]
    for cluster in range(graph.n_clusters):  # all at once would take C·E·D numbers
        slots = graph.edge_labels[cluster]
        stored = slots < model.n_labels
        labels = slots[stored]
        directions = torch.nn.functional.normalize(model.labels.weight[labels].float(), dim=1)
        alike = directions @ model.clusters.weight[cluster].float()
        parts = (torch.full_like(labels, cluster), labels, scores[cluster][stored], alike)
        for column, part in zip(columns, parts, strict=True):
            column.append(part.cpu().numpy())
    clusters, labels_, found, alikeness = (np.concatenate(column) for column in columns)
    return clusters, labels_, found, alikeness
