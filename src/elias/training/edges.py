"""The first edges of the learned graph, from where training points went in stage 1 (Eq. 9–10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import csr_matrix

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def edge_counts(
    beams: NDArray[np.int64], scores: NDArray[np.float32], labels: csr_matrix, n_clusters: int
) -> csr_matrix:
    """Return A' = MᵀY (C, L), M the top-b cluster scores of each training point, Eq. 9."""
    n_points, width = beams.shape
    offsets = np.arange(n_points + 1, dtype=np.int64) * width
    matrix = csr_matrix((scores.ravel(), beams.ravel(), offsets), shape=(n_points, n_clusters))
    ones = csr_matrix(
        (np.ones(labels.nnz, dtype=np.float32), labels.indices, labels.indptr), shape=labels.shape
    )
    return (matrix.T.tocsr() @ ones).tocsr()


def strongest_edges(
    counts: csr_matrix, partition: NDArray[np.int64], edges_per_cluster: int
) -> NDArray[np.int64]:
    """Return each cluster's κ labels of highest count (C, κ), padded with L.

    A label that no cluster would keep holds on to its stage 1 cluster, where it takes the place
    of the weakest edge, so that every label stays within reach.
    """
    n_clusters, n_labels = counts.shape
    must = np.zeros(n_labels, dtype=bool)
    kept: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * n_clusters
    stale = np.ones(n_clusters, dtype=bool)
    while stale.any():
        for cluster in np.flatnonzero(stale).tolist():
            own = np.flatnonzero(must & (partition == cluster))
            kept[cluster] = _keep(counts, cluster, own, edges_per_cluster)
        linked = np.zeros(n_labels, dtype=bool)
        linked[np.concatenate(kept)] = True
        stale[:] = False
        stale[partition[~linked]] = True
        must |= ~linked
    edges = np.full((n_clusters, edges_per_cluster), n_labels, dtype=np.int64)
    for cluster, labels in enumerate(kept):
        edges[cluster, : len(labels)] = labels
    return edges


def _keep(
    counts: csr_matrix, cluster: int, own: NDArray[np.int64], edges_per_cluster: int
) -> NDArray[np.int64]:
    begin, end = counts.indptr[cluster], counts.indptr[cluster + 1]
    labels = counts.indices[begin:end].astype(np.int64)
    strength = counts.data[begin:end].astype(np.float64)
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
