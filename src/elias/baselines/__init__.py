"""What ELIAS is measured against: one-vs-all with the same encoder, and nearest neighbours."""

from elias.baselines.neighbours import NearestNeighbours

__all__ = ["NearestNeighbours"]
