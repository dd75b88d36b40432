"""ELIAS++: a sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""

from elias.rerank.calibration import Calibration, mixed
from elias.rerank.features import RankerFeatures
from elias.rerank.names import LabelNames
from elias.rerank.ranker import SparseRanker, relevance
from elias.rerank.reranker import Candidates, RankedScores, Reranker, relevant_candidates
from elias.rerank.storage import load_reranker, save_reranker

__all__ = [
    "Calibration",
    "Candidates",
    "LabelNames",
    "RankedScores",
    "RankerFeatures",
    "Reranker",
    "SparseRanker",
    "load_reranker",
    "mixed",
    "relevance",
    "relevant_candidates",
    "save_reranker",
]
