"""Train linear peers on a corpus: XR-Linear (PECOS), Parabel and Bonsai (omikuji).

    python3 -m venv peers && peers/bin/pip install libpecos omikuji scikit-learn
    peers/bin/python benchmarks/linear_peers.py data/boe-subjects --out RESULTS

Run it with the interpreter of an environment that has the peers; it needs neither elias nor its
dependencies. A corpus is a folder with ``train.jsonl`` and ``test.jsonl`` (see
``public_corpora.py``), or with ``raw/trn_X.txt``, ``raw/tst_X.txt``, ``Y.trn.npz`` and
``Y.tst.npz``.

The points are tf-idf vectors of words. The peers have the settings of ``elias experiment compare``:
XR-Linear with its defaults, alone and averaged over three clustering seeds, Parabel and Bonsai with
three trees. Their labels are those with training points. The metrics are those of ``elias
evaluate``: test points without labels count as 0 in P and nDCG and do not count in R, and labels
without training points count in the denominators. Seconds are for training on all cores, with the
vectors of the training points.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from cpu_setup import write_json
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

RUN_PEER = Path(__file__).parents[1] / "src" / "elias" / "experiments" / "external_baseline.py"
TITLES = {
    "xr-linear": "XR-Linear",
    "xr-linearx3": "XR-Linear ×3",
    "parabel": "Parabel",
    "bonsai": "Bonsai",
}
SEEDS = [0, 1, 2]
TOP_K = 100
PACKAGES = ("libpecos", "omikuji", "scikit-learn")
COLUMNS = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "R@100", "seconds")


def load_run_peer():
    """Load the module that trains peers, without the package around it."""
    spec = importlib.util.spec_from_file_location("external_baseline", RUN_PEER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_corpus(folder):
    """Return texts and labels (N, L) of the training points, then of the test points."""
    if (folder / "Y.trn.npz").is_file():
        parts = []
        for split in ("trn", "tst"):
            lines = (folder / "raw" / f"{split}_X.txt").read_text("utf8").split("\n")
            labels = sparse.load_npz(folder / f"Y.{split}.npz").tocsr().astype(np.float32)
            parts += [lines[: labels.shape[0]], labels]
        return parts
    splits = []
    for split in ("train", "test"):
        with (folder / f"{split}.jsonl").open(encoding="utf8") as file:
            splits.append([json.loads(line) for line in file])
    names = sorted({name for points in splits for point in points for name in point["labels"]})
    ids = {name: label for label, name in enumerate(names)}
    parts = []
    for points in splits:
        rows = [sorted({ids[name] for name in point["labels"]}) for point in points]
        starts = np.cumsum([0, *map(len, rows)])
        columns = [label for row in rows for label in row]
        values = np.ones(len(columns), dtype=np.float32)
        shape = len(points), len(names)
        labels = sparse.csr_matrix((values, columns, starts), shape=shape)
        parts += [[point["text"] for point in points], labels]
    return parts


def train_peers(train_texts, train_labels, test_texts, min_df):
    """Yield name, seconds to train, and scores (N, L) of the test points, for each peer."""
    run_peer = load_run_peer()
    begin = time.perf_counter()
    vectorizer = TfidfVectorizer(
        sublinear_tf=True, token_pattern=r"(?u)\b\w+\b", min_df=min_df, dtype=np.float32
    )
    vectors = vectorizer.fit_transform(train_texts)
    seconds = time.perf_counter() - begin
    known = np.flatnonzero(train_labels.getnnz(axis=0))
    matrices = {
        "train_x": vectors,
        "train_y": train_labels[:, known],
        "test_x": vectorizer.transform(test_texts),
    }
    for method in ("xr-linear", "parabel", "bonsai"):
        with tempfile.TemporaryDirectory() as out:
            job = {"method": method, "seeds": SEEDS, "top_k": TOP_K, "out": out}
            for name, matrix in matrices.items():
                job[name] = f"{out}/{name}.npz"
                sparse.save_npz(job[name], matrix)
            for part in run_peer.run(job)["parts"]:
                scores = sparse.load_npz(part["scores"]).tocoo()
                entries = scores.data, (scores.row, known[scores.col])
                shape = len(test_texts), train_labels.shape[1]
                total = sparse.csr_matrix(entries, shape=shape)
                yield method + part["name"], seconds + part["train_seconds"], total


def rank(scores):
    """Return the labels of each row by descending score (N, TOP_K), -1 where there are none."""
    scores.sort_indices()  # equal scores: the smaller label first
    ranked = np.full((scores.shape[0], TOP_K), -1)
    for row, (start, end) in enumerate(zip(scores.indptr, scores.indptr[1:], strict=False)):
        order = np.argsort(-scores.data[start:end], kind="stable")[:TOP_K]
        ranked[row, : len(order)] = scores.indices[start:end][order]
    return ranked


def measure(ranked, truth):
    """Return the metrics in percent."""
    hits = np.zeros(ranked.shape)
    for row, labels in enumerate(ranked):
        hits[row] = np.isin(labels, truth.indices[truth.indptr[row] : truth.indptr[row + 1]])
    n_true = np.diff(truth.indptr)
    discounts = 1 / np.log2(np.arange(2, 7))
    ideal = np.append(0, discounts.cumsum())[np.minimum(n_true, 5)]
    metrics = {f"P@{k}": hits[:, :k].mean() for k in (1, 3, 5)}
    metrics["nDCG@5"] = np.mean(hits[:, :5] @ discounts / np.maximum(ideal, 1))
    some = n_true > 0
    for k in (10, 100):
        metrics[f"R@{k}"] = np.mean(hits[some, :k].sum(axis=1) / n_true[some])
    return {name: round(100 * float(value), 2) for name, value in metrics.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="+", type=Path, help="corpora with a test split")
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    parser.add_argument("--min-df", type=int, default=2, help="training texts with a word (2)")
    arguments = parser.parse_args()
    versions = {package: version(package) for package in PACKAGES}
    print(", ".join(f"{name} {number}" for name, number in versions.items()), file=sys.stderr)
    table = [f"| corpus | peer | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for folder in arguments.data:
        train_texts, train_labels, test_texts, truth = read_corpus(folder)
        results = {"corpus": folder.name, "versions": versions, "min_df": arguments.min_df}
        peers = train_peers(train_texts, train_labels, test_texts, arguments.min_df)
        for name, seconds, scores in peers:
            result = results[name] = measure(rank(scores), truth)
            result["seconds"] = round(seconds, 1)
            values = " | ".join(f"{result[column]:.2f}" for column in COLUMNS[:-1])
            table.append(f"| {folder.name} | {TITLES[name]} | {values} | {seconds:.1f} |")
            write_json(arguments.out, f"{folder.name}.json", results)
    print("\n".join(table))  # at the end: omikuji prints its own progress


if __name__ == "__main__":
    main()
