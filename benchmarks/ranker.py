"""Compare training the sparse ranker with PECOS's MLModel on the same sub-problems.

    python benchmarks/ranker.py --make-environment      # once: install PECOS in an environment
    python benchmarks/ranker.py --out runs/ranker.json

The problem is generated: points of two topics each, whose 100 labels are the candidates, with words
and a vector that distinguish the relevant ones. Both stop at the same tolerance. The result is the
fastest of several alternating runs in CPU time, which other programs disturb less than wall-clock
time. PECOS needs an older numpy, so it runs in its own environment.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numba
import numpy as np
from scipy import sparse as sp

from elias.rerank.solver import fit_label_classifiers, group_pairs
from elias.text.vectorizer import unit_rows

PEER = Path(__file__).with_name("ranker_pecos.py")
NEEDS = ["libpecos", "numpy<2", "scipy<1.14"]
SETTINGS = {"cost": 1.0, "tolerance": 0.1, "max_iterations": 100, "prune": 0.1}
KEY_WORDS = 8
COMMON_WORDS = 44


def make_problem(sizes, seed=0):
    """Return features (N, F), dense (N, D), candidates (N, k) and labels (N, L)."""
    n, n_words, dim, n_labels, k = sizes
    rng = np.random.default_rng(seed)
    per_topic = k // 2
    n_topics = n_labels // per_topic
    chance = 1 / (np.arange(n_topics) + 20.0)
    first = rng.choice(n_topics, n, p=chance / chance.sum())
    topics = np.stack([first, (first + rng.integers(1, n_topics, n)) % n_topics], axis=1)
    candidates = (topics[:, :, None] * per_topic + np.arange(per_topic)).reshape(n, -1)

    liking = -np.log(np.arange(per_topic) + 2.0) + rng.gumbel(size=(n, 2, per_topic))
    liked = np.argsort(-liking, axis=2)[:, :, :2]  # two relevant labels of each topic
    relevant = (topics[:, :, None] * per_topic + liked).reshape(n, 4)
    labels = sp.csr_matrix(
        (np.ones(4 * n, dtype=np.float32), relevant.ravel(), 4 * np.arange(n + 1)),
        shape=(n, n_labels),
    )
    labels.sort_indices()
    return (
        make_features(rng, relevant, n_words, n_topics),
        make_vectors(rng, relevant, (n_topics, per_topic, dim)),
        candidates,
        labels,
    )


def make_features(rng, relevant, n_words, n_topics):
    """Return four key words of each relevant label among common ones; tf-idf, unit rows."""
    n, n_labels = len(relevant), int(relevant.max()) + 1
    keys = rng.integers(n_words // 10, n_words, (max(n_labels, n_topics), KEY_WORDS))
    shown = np.take_along_axis(keys[relevant], rng.integers(0, KEY_WORDS, (n, 4, 4)), axis=2)
    frequency = (np.arange(n_words) + 10.0) ** -0.9
    common = rng.choice(n_words, (n, COMMON_WORDS), p=frequency / frequency.sum())
    words = np.concatenate([shown.reshape(n, -1), common], axis=1)
    counts = sp.csr_matrix(
        (np.ones(words.size, dtype=np.float32), words.ravel(), words.shape[1] * np.arange(n + 1)),
        shape=(n, n_words),
    )
    counts.sum_duplicates()
    idf = np.log(n / (1 + counts.getnnz(axis=0))) + 1
    counts.data = (1 + np.log(counts.data)) * idf[counts.indices].astype(np.float32)
    return unit_rows(counts)


def make_vectors(rng, relevant, shape):
    """Return noisy unit sums of the relevant labels' vectors, which lean to their topics."""
    n_topics, per_topic, dim = shape
    if dim == 0:
        return np.zeros((len(relevant), 0), dtype=np.float32)
    topic = 2 * rng.standard_normal((n_topics, 1, dim), dtype=np.float32)
    label = rng.standard_normal((n_topics, per_topic, dim), dtype=np.float32) + topic
    noise = 3 * rng.standard_normal((len(relevant), dim), dtype=np.float32)
    vectors = label.reshape(-1, dim)[relevant].sum(axis=1) + noise
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def run_ours(problem):
    """Train once; return the times and (weights, biases)."""
    features, dense, candidates, labels = problem
    cpu, wall = time.process_time(), time.perf_counter()
    weights, biases, _ = fit_label_classifiers(
        features, dense, group_pairs(candidates, labels), **SETTINGS
    )
    timed = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return timed | {"weights": int(weights.nnz)}, (weights, biases)


def write_problem(folder, problem):
    features, dense, candidates, labels = problem
    starts = candidates.shape[1] * np.arange(len(candidates) + 1)
    ones = np.ones(candidates.size, dtype=np.float32)
    mask = sp.csr_matrix((ones, candidates.ravel(), starts), shape=labels.shape) + labels
    mask.data[:] = 1
    for name, matrix in (("features", features), ("labels", labels), ("mask", mask)):
        sp.save_npz(folder / f"{name}.npz", matrix, compressed=False)
    np.save(folder / "dense.npy", dense)
    (folder / "settings.json").write_text(json.dumps(SETTINGS))


def run_peer(python, folder, n_threads):
    """Train PECOS once in a separate process; return the times and (weights, biases)."""
    command = [str(python), str(PEER), str(folder), str(n_threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"PECOS failed:\n{done.stderr[-2000:]}")
    both = sp.load_npz(folder / "pecos.npz")
    weights, biases = both[:, :-1].tocsr(), both[:, [-1]].toarray().ravel()
    return json.loads(done.stdout.strip().splitlines()[-1]), (weights, biases)


def mean_objective(problem, fitted, n_labels=200):
    """Return the mean objective over the first labels, a measure of precision."""
    features, dense, candidates, labels = problem
    weights, biases = fitted
    starts, rows, signs = group_pairs(candidates, labels)
    points = sp.hstack([features, sp.csr_matrix(dense)], format="csr")
    losses = []
    for label in range(n_labels):
        span = slice(starts[label], starts[label + 1])
        weight = weights[label].toarray().ravel().astype(np.float64)
        slack = np.maximum(0, 1 - signs[span] * (points[rows[span]] @ weight + biases[label]))
        losses.append(0.5 * (weight @ weight + biases[label] ** 2) + (slack**2).sum())
    return float(np.mean(losses))


def interpreter(environment):
    """Return the Python of the PECOS environment; if missing, explain how to create it."""
    python = environment / "bin" / "python"
    check = [str(python), "-c", "import pecos"]
    if python.exists() and not subprocess.run(check, capture_output=True, check=False).returncode:
        return python
    print(
        f"no PECOS in {environment}: only ours runs; --make-environment installs it",
        file=sys.stderr,
    )
    return None


def make_environment(environment):
    venv.create(environment, with_pip=True)
    subprocess.run([str(environment / "bin" / "pip"), "install", "-q", *NEEDS], check=True)


def compare(problem, python, runs, n_threads):
    """Run both alternately; return the fastest run of each and its objective."""
    results = {"ours": [], "pecos": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_problem(folder, problem)
        for _ in range(runs):
            results["ours"].append(run_ours(problem))
            if python is not None:
                results["pecos"].append(run_peer(python, folder, n_threads))
    best = {}
    for name, runs in results.items():
        if runs:
            timed, fitted = min(runs, key=lambda run: run[0]["cpu_s"])
            best[name] = timed | {"objective": mean_objective(problem, fitted)}
            best[name]["all_cpu_s"] = [round(run[0]["cpu_s"], 2) for run in runs]
    return best


def show(best):
    print("| | CPU seconds | wall seconds | weights kept | mean objective |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in best.items():
        print(
            f"| {name} | {row['cpu_s']:.1f} | {row['wall_s']:.1f} | {row['weights']:,} "
            f"| {row['objective']:.4f} |"
        )
    if "pecos" in best:
        print(f"\nours / PECOS in CPU time: {best['ours']['cpu_s'] / best['pecos']['cpu_s']:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, default=Path(".cache/pecos"))
    parser.add_argument("--make-environment", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=384, help="dense features; 0 for none")
    parser.add_argument("--labels", type=int, default=10_000)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    if asked.make_environment:
        make_environment(asked.environment)
    python = interpreter(asked.environment)
    sizes = (asked.points, asked.words, asked.dim, asked.labels, asked.candidates)
    run_ours(make_problem((200, 200, asked.dim, 200, 20)))  # compile first
    best = compare(make_problem(sizes), python, asked.runs, numba.get_num_threads())
    show(best)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        names = ("points", "words", "dim", "labels", "candidates")
        figures = dict(zip(names, sizes, strict=True)) | SETTINGS | best
        asked.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
