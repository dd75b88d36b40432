"""ELIAS++: a sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""

from elias.predictions import Candidates
from elias.rerank.calibration import Calibration, LabelNames, combine_scores
from elias.rerank.reranker import Reranker, relevant_candidates
from elias.rerank.sparse_ranker import RankerFeatures, SparseRanker, relevance

__all__ = [
    "Calibration",
    "Candidates",
    "LabelNames",
    "RankerFeatures",
    "Reranker",
    "SparseRanker",
    "combine_scores",
    "relevance",
    "relevant_candidates",
]
