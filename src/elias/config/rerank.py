"""What the sparse ranker and the calibration of scores can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from elias.config.checks import need


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankConfig:
    """The sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""

    enabled: bool | None = None
    """Train the ranker after the last stage. Derived: where a CPU is done in minutes, up to
    200,000 labels and 1,000,000 points."""
    candidates: int = 100
    """Labels of each text that are ranked anew, the best of the model."""
    word_ngrams: int = 2
    """Longest run of words that is a feature: 1 words, 2 pairs of neighbours too; 0 none."""
    char_ngrams: tuple[int, int] = (3, 5)
    """Shortest and longest character n-gram that is a feature; (0, 0) for none."""
    min_count: int = 1
    """A feature must stand in this many training texts."""
    max_features: int = 1_000_000
    """Keep at most this many words and n-grams, the most frequent."""
    embedding: Literal["none", "encoder", "first"] = "none"
    """Dense features beside them: φ as trained (the paper's, but overfit on the points that the
    ranker trains on), or φ as it was before training, for a pretrained encoder."""
    loss: Literal["squared-hinge", "logistic"] = "squared-hinge"
    """What an error of the ranker is: that of the paper's program, or that of its Eq. 17, beside
    which q is best ``sigmoid`` (`transform`)."""
    cost: float = 1.0
    """C: what an error costs beside the length of the weights."""
    tolerance: float = 0.1
    """ε: a classifier is done when no step would change its gradient by more."""
    max_iterations: int = 100
    """Passes over the points of a label, at most."""
    prune: float = 0.1
    """Weights that are smaller are dropped."""
    transform: Literal["l3-hinge", "sigmoid"] = "l3-hinge"
    """How a margin s becomes q: exp(−max(1−s, 0)³), or σ(s)."""
    sharpness: float | None = None
    """γ: q is taken to this power, so that a small one lets p decide more. None: of 1, ½, ¼ and
    ⅛ the one that ranks the validation points best (nDCG@5 of p·q); 1, the paper's, without any."""
    calibrate: bool = True
    """Fit the decision trees T (appendix C.2) on the validation points, where there are any."""
    names: bool = True
    """Fit a second T beside the paper's that is also told how near the label's name is to the text
    (their likeness, and how much of the name stands in it), and rank by that. Beyond the paper; it
    takes texts, and names that are words."""
    trees: int = 40
    """How many trees T is the mean of, each grown on its own draw of the points, with half of the
    questions open to each node; 1 in the paper, grown on all points and free to ask anything."""
    tree_depth: int = 5
    """How many questions a tree may ask."""
    tree_leaf: int = 20
    """Pairs that each answer of a tree must rest on; 1 in the paper."""
    mixture: Literal["sum", "blend"] = "sum"
    """Final score: ``sum``, T + p·q as in the paper; ``blend``, 0.3·T + 0.7·p·q as in its
    program."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name in (
            "candidates",
            "min_count",
            "max_features",
            "max_iterations",
            "trees",
            "tree_depth",
            "tree_leaf",
        ):
            value = getattr(self, name)
            need(value >= 1, f"rerank.{name} must be >= 1, not {value}")
        need(
            0 <= self.word_ngrams <= 5,
            f"rerank.word_ngrams must be in 0..5, not {self.word_ngrams}",
        )
        low, high = self.char_ngrams
        need(
            0 <= low <= high <= 16,
            f"rerank.char_ngrams must be [shortest, longest] within 0..16, not {[low, high]}",
        )
        need(
            self.word_ngrams > 0 or high > 0 or self.embedding != "none",
            "rerank has no features: set rerank.word_ngrams, rerank.char_ngrams or "
            "rerank.embedding",
        )
        for name in ("cost", "tolerance"):
            value = getattr(self, name)
            need(
                0 < value < math.inf,
                f"rerank.{name} must be greater than 0 and finite, not {value}",
            )
        need(
            self.sharpness is None or 0 < self.sharpness < math.inf,
            f"rerank.sharpness must be greater than 0 and finite, not {self.sharpness}",
        )
        need(0 <= self.prune < math.inf, f"rerank.prune must be >= 0, not {self.prune}")
        need(self.tree_depth <= 20, f"rerank.tree_depth must be <= 20, not {self.tree_depth}")
