"""The sparse ranker: one masked linear classifier for each label (§3.5, appendix C.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from scipy.sparse import csr_matrix

from elias.errors import DataError
from elias.rerank.features import unit_embedding
from elias.rerank.scoring import as_classifiers, candidate_margins
from elias.rerank.solver import FitSettings, fit_masked, group_pairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elias.config import RerankConfig
    from elias.rerank.scoring import Classifiers


Transform: TypeAlias = Literal["l3-hinge", "sigmoid"]

NEVER_SEEN = -1.0
"""The margin of a label that no training point has as a candidate: that of a sure negative."""


def relevance(margins: NDArray[np.float32], transform: Transform) -> NDArray[np.float32]:
    """Return q in [0, 1] for margins s: exp(−max(1−s, 0)³), or σ(s).

    >>> relevance(np.float32([2, 1, -np.inf]), "l3-hinge").tolist()
    [1.0, 1.0, 0.0]
    """
    if transform == "l3-hinge":
        q = np.exp(-(np.maximum(1 - margins, 0) ** 3))
    else:
        faint = np.exp(-np.abs(margins))  # cannot overflow
        q = np.where(margins >= 0, 1, faint) / (1 + faint)
    found: NDArray[np.float32] = q.astype(np.float32)
    return found


@dataclass(frozen=True)
class SparseRanker:
    """Classifiers w̄_ℓ over ψ(x), each trained on the points that have its label as a candidate.

    >>> from elias.config import RerankConfig
    >>> features = csr_matrix(np.eye(4, dtype=np.float32)[[0, 0, 1, 1]])
    >>> labels = csr_matrix(np.float32([[1, 0], [1, 0], [0, 1], [0, 1]]))
    >>> candidates = np.array([[0, 1]] * 4)
    >>> ranker = SparseRanker.fit(features, None, candidates, labels, RerankConfig())
    >>> (ranker.score(features, None, candidates) > 0).tolist()
    [[True, False], [True, False], [False, True], [False, True]]
    """

    weights: csr_matrix
    """(L, F + D) what is left of the weights after pruning, columns ascending, float32."""
    biases: NDArray[np.float32]
    """(L,)"""
    n_dense: int
    """D: how many of the last columns are of the embedding."""

    @property
    def n_labels(self) -> int:
        """Return L."""
        return int(self.weights.shape[0])

    @property
    def n_features(self) -> int:
        """Return F, the width of the sparse features."""
        return int(self.weights.shape[1]) - self.n_dense

    @classmethod
    def fit(
        cls,
        features: csr_matrix,
        embedding: NDArray[np.float32] | None,
        candidates: NDArray[np.integer[Any]],
        labels: csr_matrix,
        config: RerankConfig,
        *,
        seed: int = 0,
    ) -> SparseRanker:
        """Train on the candidates of training points, to which missing positives are added.

        Minimises Eq. 17 for each label apart, with the logistic loss, or a squared hinge in its
        place as the published program has.

        Args:
            features: (N, F) sparse part of ψ(x), rows of length 1.
            embedding: (N, D) φ(x), scaled to length 1 here; None for none.
            candidates: (N, k) label ids, best first or in any order; L is padding.
            labels: (N, L) relevance.
            config: Cost, tolerance, what is pruned.
            seed: Of the order in which points are visited.
        """
        dense = unit_embedding(embedding, features.shape[0])
        groups = group_pairs(candidates, labels)
        settings = FitSettings(
            cost=config.cost,
            tolerance=config.tolerance,
            max_iterations=config.max_iterations,
            prune=config.prune,
            seed=seed,
            loss=config.loss,
        )
        weights, biases = fit_masked(features, dense, groups, settings)
        biases[np.diff(groups[0]) == 0] = NEVER_SEEN
        return cls(weights, biases, dense.shape[1])

    def score(
        self,
        features: csr_matrix,
        embedding: NDArray[np.float32] | None,
        candidates: NDArray[np.integer[Any]],
    ) -> NDArray[np.float32]:
        """Return the margins s = w̄_ℓ·ψ(x) + b_ℓ of each point's candidates (N, k).

        Args:
            features: (N, F) as `fit` had them.
            embedding: (N, D) φ(x), or None, as `fit` had it.
            candidates: (N, k) label ids; L is padding, whose margin is -inf.
        """
        dense = unit_embedding(embedding, features.shape[0])
        for name, width, own in (
            ("features", features.shape[1], self.n_features),
            ("embedding", dense.shape[1], self.n_dense),
        ):
            if width != own:
                raise DataError(f"the {name} have width {width}, the ranker was trained on {own}")
        return candidate_margins(features, dense, self._classifiers, candidates)

    @cached_property
    def _classifiers(self) -> Classifiers:
        return as_classifiers(self.weights, self.biases)
