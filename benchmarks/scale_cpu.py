"""Measure time and memory of clustering, edges, tf-idf and metrics on generated data.

    python benchmarks/scale_cpu.py --labels 300000 --points 200000 --out RESULTS
    python benchmarks/scale_cpu.py                       # 3 million labels, 2 million points

A point has a topic. Half of its words and most of its labels belong to the topic; the others are
random with a skewed frequency. Memory is that of the whole process, so a part starts with what the
previous parts have left. Functions are compiled on a small problem first, which is not measured.
"""

import argparse
import logging
import os
import time
from contextlib import nullcontext
from pathlib import Path

import numba
import numpy as np
import torch
from cpu_setup import Parts, write_json
from scipy.sparse import csr_matrix

from elias import progress
from elias.clustering import balanced_clusters, label_centroids
from elias.data.synthetic import pseudowords
from elias.metrics import inverse_propensities, score
from elias.predictions import Predictions
from elias.text.vectorizer import Featurizer
from elias.training.initialization import edge_counts, first_logits, strongest_edges

LABELS_PER_TOPIC = 50


def rows_of(ids, n_columns, values=None):
    """Return (N, n_columns) rows of the given ids; repeated ids are summed."""
    n, width = ids.shape
    ids = np.sort(ids, axis=1)
    data = np.ones(n * width, dtype=np.float32) if values is None else values
    matrix = csr_matrix((data, ids.ravel(), np.arange(n + 1) * width), shape=(n, n_columns))
    matrix.has_sorted_indices = True
    matrix.sum_duplicates()
    return matrix


def draw(rng, n, shape, power=3):
    """Draw ids below n, low ids more often."""
    return (n * rng.random(shape, dtype=np.float32) ** power).astype(np.int32).clip(0, n - 1)


def make_points(given, rng):
    """Return topics (N,), labels (N, L) and bags of words (N, words)."""
    n_topics = max(1, given.labels // LABELS_PER_TOPIC)
    topics = rng.integers(0, n_topics, given.points, dtype=np.int32)
    n_own = given.labels_per_point - given.labels_per_point // 8
    own = topics[:, None] * LABELS_PER_TOPIC + draw(rng, LABELS_PER_TOPIC, (given.points, n_own), 2)
    any_label = draw(rng, given.labels, (given.points, given.labels_per_point - n_own))
    labels = rows_of(np.hstack([own, any_label]) % given.labels, given.labels)
    labels.data[:] = 1
    half = given.words_per_point // 2
    key = (
        topics[:, None].astype(np.int64) * 7919 + draw(rng, 60, (given.points, half)) * 104_729
    ) % (given.vocabulary)
    common = draw(rng, given.vocabulary, (given.points, given.words_per_point - half))
    bow = rows_of(np.hstack([key.astype(np.int32), common]), given.vocabulary)
    length = np.sqrt(np.add.reduceat(bow.data**2, bow.indptr[:-1]))
    bow.data /= np.repeat(length, np.diff(bow.indptr))
    return topics, labels, bow


def make_beams(given, n_clusters, topics, rng):
    """Return the clusters of each point (N, b) and their weights."""
    near = (topics[:, None] * 31 + np.arange(given.beam)) % n_clusters
    far = rng.integers(0, n_clusters, near.shape, dtype=np.int32)
    beams = np.where(rng.random(near.shape, dtype=np.float32) < 0.5, near, far).astype(np.int64)
    scores = np.sort(rng.random(near.shape, dtype=np.float32), axis=1)[:, ::-1].copy()
    return beams, scores


def cluster_and_link(given, parts, rng):
    topics, labels, bow = make_points(given, rng)
    embedding = rng.standard_normal((given.points, given.dim), dtype=np.float32)
    with parts.timed("centroids of labels", pairs=labels.nnz) as facts:
        sparse, dense = label_centroids(labels, bow, embedding if given.dim else None)
        facts["nonzeros"] = sparse.nnz
    del embedding
    n_clusters = 2 ** int(np.ceil(np.log2(max(2, given.labels / 100))))
    with parts.timed("balanced 2-means", clusters=n_clusters):
        partition = balanced_clusters(sparse, dense, n_clusters, seed=0)
    del sparse, dense, bow
    beams, scores = make_beams(given, n_clusters, topics, rng)
    budget = min(given.labels, max(1000, 2 * LABELS_PER_TOPIC))
    with parts.timed("edges: A' = M'Y", products=beams.size * labels.nnz // given.points) as facts:
        counts = edge_counts(beams, scores, labels, partition, n_clusters, budget)
        facts["kept"] = counts.nnz
    with parts.timed("edges: the strongest"):
        edges = strongest_edges(counts, partition, budget)
    with parts.timed("edges: first logits"):
        first_logits(edges, counts, "counts", torch.Generator())
    return labels


def measure_metrics(given, parts, labels, rng):
    names = [f"{kind}@{k}" for kind in ("P", "nDCG", "PSP", "PSnDCG") for k in (1, 3, 5)]
    names += [f"R@{k}" for k in (10, 100)]
    ids = rng.integers(0, given.labels, (given.points, 100), dtype=np.int64)
    ids[:, 0] = labels.indices[labels.indptr[:-1]]
    ids.sort(axis=1)  # repeats would be counted twice
    ids[:, 1:][ids[:, 1:] == ids[:, :-1]] = given.labels
    scores = np.broadcast_to(np.linspace(1, 0, 100, dtype=np.float32), ids.shape)
    predictions = Predictions(ids, scores, given.labels)
    weights = inverse_propensities(labels.getnnz(axis=0), given.points)
    with parts.timed("metrics", predictions=ids.size):
        score(predictions, labels, weights, names)


def make_texts(given, rng):
    words = np.array(pseudowords(0, min(given.vocabulary, 200_000)))
    return [" ".join(row) for row in words[draw(rng, len(words), (given.texts, 12))]]


def measure_texts(given, parts, rng):
    texts = make_texts(given, rng)
    with parts.timed("tf-idf: vocabulary", texts=len(texts)):
        featurizer = Featurizer.fit(texts)
    with parts.timed("tf-idf: features") as facts:
        facts["nonzeros"] = featurizer.transform(texts).nnz


def measure(given, parts):
    rng = np.random.default_rng(given.seed)
    if "labels" in given.only:
        measure_metrics(given, parts, cluster_and_link(given, parts, rng), rng)
    if "texts" in given.only:
        measure_texts(given, parts, rng)


def arguments(parser):
    parser.add_argument("--labels", type=int, default=3_000_000)
    parser.add_argument("--points", type=int, default=2_000_000)
    parser.add_argument("--texts", type=int, help="texts for tf-idf; default: as many as points")
    parser.add_argument("--labels-per-point", type=int, default=36)
    parser.add_argument("--words-per-point", type=int, default=40)
    parser.add_argument("--vocabulary", type=int, default=200_000)
    parser.add_argument(
        "--dim", type=int, default=128, help="dimension of φ in the centroids; 0 for none"
    )
    parser.add_argument("--beam", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["labels", "texts"],
        choices=["labels", "texts"],
        help="labels: clustering, edges and metrics; texts: tf-idf",
    )
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)


def run(given):
    """Compile on a small problem, then measure; return the parts."""
    given.texts = given.texts or given.points
    numba.set_num_threads(given.threads)
    small = {"labels": 2000, "points": 1000, "texts": 1000, "vocabulary": 500}
    start = time.perf_counter()
    measure(argparse.Namespace(**{**vars(given), **small}), Quiet())
    print(f"compiled in {time.perf_counter() - start:.1f} s; {given.threads} threads", flush=True)
    parts = Parts()
    measure(given, parts)
    return parts.rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser)
    parser.add_argument("--out", type=Path, help="folder for scale_cpu.json")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    progress.enable()
    rows = run(given)
    sizes = {name: value for name, value in vars(given).items() if name != "out"}
    write_json(
        given.out, "scale_cpu.json", {"sizes": sizes, "cores": os.cpu_count(), "parts": rows}
    )


class Quiet(Parts):
    """Measure without output."""

    def timed(self, name, **facts):
        return nullcontext(facts)


if __name__ == "__main__":
    main()
