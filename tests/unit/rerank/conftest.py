"""A small corpus with the candidates that a model of middling worth would name."""

from typing import NamedTuple

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from elias.config import RerankConfig
from elias.rerank import Candidates, Reranker

N_LABELS = 12


class Problem(NamedTuple):
    train: Candidates
    labels: csr_matrix
    validation: tuple[Candidates, csr_matrix]
    config: RerankConfig


def points(n_points, seed):
    """Texts that name their labels among other words; every fifth candidate is padding."""
    rng = np.random.default_rng(seed)
    relevant = rng.random((n_points, N_LABELS)) < 0.2
    noise = rng.integers(0, 40, (n_points, 4))
    texts = [
        " ".join([f"label{i}" for i in np.flatnonzero(own)] + [f"word{i}" for i in some])
        for own, some in zip(relevant, noise, strict=True)
    ]
    wanted = relevant + rng.standard_normal((n_points, N_LABELS))
    ids = np.argsort(-wanted, axis=1)[:, :8]
    scores = 1 / (1 + np.exp(-np.take_along_axis(wanted, ids, axis=1)))
    padded = rng.random(ids.shape) < 0.2
    ids[padded], scores[padded] = N_LABELS, 0
    embedding = (relevant @ rng.standard_normal((N_LABELS, 5))).astype(np.float32)
    candidates = Candidates(texts, ids, scores.astype(np.float32), embedding)
    return candidates, csr_matrix(relevant, dtype=np.float32)


@pytest.fixture(scope="session")
def problem():
    train, labels = points(300, seed=0)
    return Problem(train, labels, points(100, seed=1), RerankConfig())


@pytest.fixture(scope="session")
def reranker(problem):
    return Reranker.fit(
        problem.train, problem.labels, problem.config, validation=problem.validation
    )
