"""Label clusters: centroids of labels, and recursive balanced 2-means over them (appendix C.1)."""

from elias.clustering.centroids import label_centroids
from elias.clustering.halving import balanced_clusters

__all__ = ["balanced_clusters", "label_centroids"]
