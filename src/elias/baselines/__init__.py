"""What ELIAS is measured against: one-vs-all with the same encoder, and nearest neighbours."""

from elias.baselines.neighbours import NearestNeighbours
from elias.baselines.one_vs_all import one_vs_all

__all__ = ["NearestNeighbours", "one_vs_all"]
