"""Write a model of any number of labels with random weights and the components of a trained one.

    python benchmarks/large_model.py MODEL --texts FILE --labels 100000 --out LARGER

The encoder has the words of the texts. The ranker has the features of MODEL and random weights, the
names are words of MODEL, and its calibrations are used. The model answers nonsense, but takes as
long as a trained one.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from cpu_predict import make_model
from scipy.sparse import csr_matrix

from elias import Elias
from elias.rerank.calibration import LabelNames
from elias.rerank.sparse_ranker import SparseRanker


def random_ranker(n_labels, n_features, n_weights, rng):
    """Return a ranker with about ``n_weights`` weights for each label."""
    columns = np.sort(rng.integers(0, n_features, (n_labels, n_weights), dtype=np.int32))
    starts = np.arange(n_labels + 1) * n_weights
    values = rng.standard_normal(columns.size, dtype=np.float32)
    weights = csr_matrix((values, columns.ravel(), starts), shape=(n_labels, n_features))
    weights.sum_duplicates()
    return SparseRanker.from_label_rows(weights, np.zeros(n_labels, dtype=np.float32), 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a trained model with all components")
    parser.add_argument("--texts", type=Path, required=True, help="one text per line")
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--weights", type=int, default=200, help="of the ranker, per label")
    parser.add_argument("--encoder", default="bag", help="bag, or the folder of a transformer")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    trained = Elias.from_pretrained(given.model)
    larger = make_model(given, given.texts.read_text("utf8").splitlines(), rng)
    features = trained.reranker.features
    words = rng.choice(features.featurizer.words, (given.labels, 3))
    larger.label_names = [f"{' '.join(row)} {i}" for i, row in enumerate(words)]
    larger.reranker = replace(
        trained.reranker,
        ranker=random_ranker(given.labels, features.n_features, given.weights, rng),
        frequencies=rng.integers(1, 100, given.labels),
        names=LabelNames.read(features, larger.label_names),
    )
    larger.config = larger.config.override({"rerank.enabled": True})
    larger.save_pretrained(given.out)


if __name__ == "__main__":
    main()
