"""A small corpus with the candidates that a mediocre model would propose."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from elias.config import RerankConfig
from elias.predictions import Candidates
from elias.rerank.reranker import Reranker
from elias.rerank.sparse_ranker import RankerFeatures

N_LABELS = 12


class Points(NamedTuple):
    """Points with their candidates, texts or features, and relevant labels."""

    candidates: Candidates
    inputs: object
    labels: csr_matrix

    @property
    def known(self):
        """The mask of candidates that are not padding."""
        return self.candidates.ids < N_LABELS

    def take(self, rows):
        """A slice of the points."""
        ids, scores, embedding = (
            getattr(self.candidates, name)[rows] for name in ("ids", "scores", "embedding")
        )
        return Points(Candidates(ids, scores, embedding), self.inputs[rows], self.labels[rows])


class Problem(NamedTuple):
    train: Points
    validation: Points
    config: RerankConfig


def make_points(n_points, seed):
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
    candidates = Candidates(ids, scores.astype(np.float32), embedding)
    return Points(candidates, texts, csr_matrix(relevant, dtype=np.float32))


def fit_reranker(train, config, validation=None, **options):
    """Fit a reranker on points, and its calibration on others."""
    features = RankerFeatures.fit(train.inputs, config)
    if validation is not None:
        validation = validation._replace(inputs=features.transform(validation.inputs))
    return Reranker.fit(
        features,
        train.candidates,
        features.transform(train.inputs),
        train.labels,
        config,
        validation=validation,
        **options,
    )


def scores_of(reranker, points, component=None):
    """The scores of a component, the last by default."""
    component = component or reranker.components[-1]
    psi = reranker.features.transform(points.inputs)
    scores, _ = reranker.scores(points.candidates, psi, [component])
    return scores[component]
