"""Cluster the labels: compute label centroids, then apply balanced 2-means (appendix C.1)."""

from elias.clustering.balanced_kmeans import balanced_clusters
from elias.clustering.centroids import label_centroids

__all__ = ["balanced_clusters", "label_centroids"]
