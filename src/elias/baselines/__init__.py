"""Baselines that ELIAS is compared with."""

from elias.baselines.knn import NearestNeighbours

__all__ = ["NearestNeighbours"]
