"""The first edges of the learned graph, from where training points went in stage 1 (Eq. 9–10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.kernels.cpu.cooccurrence import Members, strongest_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def edge_counts(
    beams: NDArray[np.int64],
    scores: NDArray[np.float32],
    labels: csr_matrix,
    partition: NDArray[np.int64],
    n_clusters: int,
    most: int,
) -> csr_matrix:
    """Return A' = MᵀY (C, L), M the top-b cluster scores of each training point, Eq. 9.

    The whole of it would not fit in memory where there are millions of labels. Of each cluster
    only the ``most`` strongest labels stay, and those of its part of the ``partition``: all that
    `strongest_edges` can ask for.
    """
    n_points, width = beams.shape
    offsets = np.arange(n_points + 1, dtype=np.int64) * width
    to_clusters = csr_matrix((scores.ravel(), beams.ravel(), offsets), shape=(n_points, n_clusters))
    of_cluster = to_clusters.T.tocsr()
    counts = strongest_counts(
        Members(of_cluster.indptr, of_cluster.indices),
        of_cluster.data,
        Members(labels.indptr, labels.indices),
        partition,
        most,
    )
    kept = csr_matrix(counts, shape=(n_clusters, labels.shape[1]))
    kept.sort_indices()
    return kept


def strongest_edges(
    counts: csr_matrix, partition: NDArray[np.int64], edges_per_cluster: int
) -> NDArray[np.int64]:
    """Return each cluster's κ labels of highest count (C, κ), padded with L.

    A label that no cluster would keep holds on to its stage 1 cluster, where it takes the place
    of the weakest edge, so that every label stays within reach.
    """
    n_clusters, n_labels = counts.shape
    order = np.argsort(partition, kind="stable")
    borders = np.searchsorted(partition[order], np.arange(n_clusters + 1))
    must = np.zeros(n_labels, dtype=bool)
    edges = np.full((n_clusters, edges_per_cluster), n_labels, dtype=np.int64)
    stale = np.ones(n_clusters, dtype=bool)
    while stale.any():
        for cluster in np.flatnonzero(stale).tolist():
            mine = order[borders[cluster] : borders[cluster + 1]]
            kept = _keep(counts, cluster, mine[must[mine]], edges_per_cluster)
            edges[cluster] = n_labels
            edges[cluster, : len(kept)] = kept
        linked = np.zeros(n_labels + 1, dtype=bool)  # the last stands for slots without an edge
        linked[edges] = True
        stale[:] = False
        stale[partition[~linked[:-1]]] = True
        must |= ~linked[:-1]
    return edges


def _keep(
    counts: csr_matrix, cluster: int, own: NDArray[np.int64], edges_per_cluster: int
) -> NDArray[np.int64]:
    begin, end = counts.indptr[cluster], counts.indptr[cluster + 1]
    labels = counts.indices[begin:end].astype(np.int64)
    strength = counts.data[begin:end].astype(np.float64)
    if len(own):
        free = ~np.isin(labels, own)
        labels, strength = labels[free], strength[free]
    order = np.lexsort((labels, -strength))[: max(0, edges_per_cluster - len(own))]
    return np.sort(np.concatenate([own, labels[order]]))


def first_logits(
    edges: NDArray[np.int64], counts: csr_matrix, how: str, generator: torch.Generator
) -> Tensor:
    """Return the logits a_{c,ℓ} to start from: ½·log(A' + 0.1), or uniform random (Eq. 10)."""
    if how == "random":
        return torch.rand(edges.shape, generator=generator)
    n_clusters, n_labels = counts.shape
    padded = csr_matrix(
        (counts.data, counts.indices, counts.indptr), shape=(n_clusters, n_labels + 1)
    )
    rows = np.repeat(np.arange(n_clusters), edges.shape[1])
    values = np.asarray(padded[rows, edges.ravel()]).reshape(edges.shape)
    return torch.from_numpy((0.5 * np.log(values + 0.1)).astype(np.float32))
