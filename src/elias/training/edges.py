"""Choose the initial edges of the learned graph from the clusters of the points (Eq. 9–10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import csr_matrix

from elias.kernels.cpu.cooccurrence import RaggedIds, strongest_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def edge_counts(
    beams: NDArray[np.int64],
    scores: NDArray[np.float32],
    labels: csr_matrix,
    partition: NDArray[np.int64],
    n_clusters: int,
    n_edges: int,
) -> csr_matrix:
    """Return A' = MᵀY (C, L), where M has the top-b cluster scores of each point (Eq. 9).

    With millions of labels the full matrix would not fit in memory. The result therefore keeps,
    for each cluster, only the ``n_edges`` labels of highest count and the labels that
    ``partition`` assigns to it. `strongest_edges` needs no other entries.
    """
    n_points, width = beams.shape
    offsets = np.arange(n_points + 1, dtype=np.int64) * width
    to_clusters = csr_matrix((scores.ravel(), beams.ravel(), offsets), shape=(n_points, n_clusters))
    of_cluster = to_clusters.T.tocsr()
    counts = strongest_counts(
        RaggedIds(of_cluster.indptr, of_cluster.indices),
        of_cluster.data,
        RaggedIds(labels.indptr, labels.indices),
        partition,
        n_edges,
    )
    matrix = csr_matrix(counts, shape=(n_clusters, labels.shape[1]))
    matrix.sort_indices()
    return matrix


def strongest_edges(
    counts: csr_matrix, partition: NDArray[np.int64], edges_per_cluster: int
) -> NDArray[np.int64]:
    """Return each cluster's κ labels of highest count (C, κ), padded with L.

    A label that no cluster selects gets an edge from its cluster in the partition, which replaces
    the weakest edge of that cluster. Every label can thus be reached.
    """
    n_clusters, n_labels = counts.shape
    order = np.argsort(partition, kind="stable")
    borders = np.searchsorted(partition[order], np.arange(n_clusters + 1))
    required = np.zeros(n_labels, dtype=bool)
    edges = np.full((n_clusters, edges_per_cluster), n_labels, dtype=np.int64)
    outdated = np.ones(n_clusters, dtype=bool)
    while outdated.any():
        for cluster in np.flatnonzero(outdated).tolist():
            members = order[borders[cluster] : borders[cluster + 1]]
            chosen = _choose(counts, cluster, members[required[members]], edges_per_cluster)
            edges[cluster] = n_labels
            edges[cluster, : len(chosen)] = chosen
        linked = np.zeros(n_labels + 1, dtype=bool)  # the last entry is for padding
        linked[edges] = True
        outdated[:] = False
        outdated[partition[~linked[:-1]]] = True
        required |= ~linked[:-1]
    return edges


def _choose(
    counts: csr_matrix, cluster: int, required: NDArray[np.int64], n_edges: int
) -> NDArray[np.int64]:
    """Return the edges of one cluster: the required labels and the labels of highest count."""
    begin, end = counts.indptr[cluster], counts.indptr[cluster + 1]
    labels = counts.indices[begin:end].astype(np.int64)
    strength = counts.data[begin:end].astype(np.float64)
    if len(required):
        is_free = ~np.isin(labels, required)
        labels, strength = labels[is_free], strength[is_free]
    order = np.lexsort((labels, -strength))[: max(0, n_edges - len(required))]
    return np.sort(np.concatenate([required, labels[order]]))


def first_logits(
    edges: NDArray[np.int64], counts: csr_matrix, method: str, generator: torch.Generator
) -> Tensor:
    """Return the initial logits a_{c,ℓ}: ½·log(A' + 0.1), or uniform random (Eq. 10)."""
    if method == "random":
        return torch.rand(edges.shape, generator=generator)
    n_clusters, n_labels = counts.shape
    padded = csr_matrix(
        (counts.data, counts.indices, counts.indptr), shape=(n_clusters, n_labels + 1)
    )
    rows = np.repeat(np.arange(n_clusters), edges.shape[1])
    values = np.asarray(padded[rows, edges.ravel()]).reshape(edges.shape)
    return torch.from_numpy((0.5 * np.log(values + 0.1)).astype(np.float32))
