"""ELIAS++: a sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""

from elias.rerank.calibration import Calibration, mixed
from elias.rerank.features import RankerFeatures
from elias.rerank.label_names import LabelNames
from elias.rerank.reranker import Candidates, RankedScores, Reranker, relevant_candidates
from elias.rerank.sparse_ranker import SparseRanker, relevance

__all__ = [
    "Calibration",
    "Candidates",
    "LabelNames",
    "RankedScores",
    "RankerFeatures",
    "Reranker",
    "SparseRanker",
    "mixed",
    "relevance",
    "relevant_candidates",
]
