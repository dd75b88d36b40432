"""Compile the kernels into numba's cache, once for all workers of the test suite.

`make test` runs this beside the lint, which keeps one core busy.
"""

from elias import EliasConfig, train
from elias.data.synthetic import synthetic_corpus

SMALL = {
    "encoder.dim": 16,
    "encoder.hidden_dim": 16,
    "rerank.candidates": 20,  # fewer than labels, so that trees are fitted
    "rerank.trees": 2,
}
corpus = synthetic_corpus(n_points=200, n_labels=40)
for index in ("graph", "all"):
    config = EliasConfig().override({**SMALL, "index.kind": index})
    train(corpus, config, device="cpu").predict(["any text"])
