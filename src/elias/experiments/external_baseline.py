"""Train a baseline and predict with it, in an environment that needs neither elias nor torch.

    python external_baseline.py probe PACKAGE RESULT     writes the version of the package
    python external_baseline.py run JOB RESULT           runs a job and writes its results

JOB and RESULT are JSON files; matrices are stored with ``scipy.sparse.save_npz``. The result is
not read from stdout, so baselines may print anything. This file must run with Python 3.9.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {"omikuji": "omikuji", "pecos": "libpecos"}
"""Name on PyPI of each baseline package, by its import name."""
METHODS = {"parabel": "omikuji", "bonsai": "omikuji", "xr-linear": "pecos"}
"""Package that implements each baseline."""
MODULES = {"omikuji": "omikuji", "pecos": "pecos.xmc.xlinear.model"}
TREES = 3
"""Number of trees of Parabel and Bonsai, as in their papers."""
BONSAI = {"cluster_balanced": False, "cluster_k": 100, "max_depth": 3}


def probe(package: str) -> dict[str, Any]:
    """Import a baseline package and return its version."""
    importlib.import_module(MODULES[package])
    return {"version": importlib.metadata.version(DISTRIBUTIONS[package])}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train a baseline, predict, and return the times, size and predictions of each model."""
    from scipy import sparse

    out, parts = Path(job["out"]), []
    train_x, train_y, test_x = (
        sparse.load_npz(job[name]).tocsr().astype("float32")
        for name in ("train_x", "train_y", "test_x")
    )
    method = _omikuji if METHODS[job["method"]] == "omikuji" else _xr_linear
    for name, times, megabytes, scores in method(job, train_x, train_y, test_x, out):
        part = {"name": name, "train_seconds": times[0], "predict_seconds": times[1]}
        path = str(out / f"scores{name}.npz")
        sparse.save_npz(path, sparse.csr_matrix(scores))
        parts.append({**part, "megabytes": megabytes, "scores": path})
    return {"parts": parts}


def _omikuji(
    job: dict[str, Any], train_x: Any, train_y: Any, test_x: Any, out: Path
) -> Iterator[tuple[str, tuple[float, float], float, Any]]:
    """Train label trees and predict point by point, since omikuji cannot predict batches."""
    from scipy import sparse

    omikuji = importlib.import_module("omikuji")
    data = out / "train.txt"
    _write_text(data, train_x, train_y)
    parameters = omikuji.Model.default_hyper_param()
    parameters.n_trees = TREES
    for name, value in BONSAI.items() if job["method"] == "bonsai" else ():
        setattr(parameters, name, value)
    start = time.perf_counter()
    model = omikuji.Model.train_on_data(str(data), parameters)
    train_seconds = time.perf_counter() - start
    model.save(str(out / "model"))
    start = time.perf_counter()
    rankings = [
        model.predict(
            list(zip(test_x.indices[a:b].tolist(), test_x.data[a:b].tolist())),  # noqa: B905 - 3.9
            top_k=job["top_k"],
        )
        for a, b in zip(test_x.indptr, test_x.indptr[1:])  # noqa: B905 - for Python 3.9
    ]
    predict_seconds = time.perf_counter() - start
    rows = [row for row, ranking in enumerate(rankings) for _ in ranking]
    labels = [int(label) for ranking in rankings for label, _ in ranking]
    scores = [float(score) for ranking in rankings for _, score in ranking]
    shape = (len(rankings), train_y.shape[1])
    matrix = sparse.csr_matrix((scores, (rows, labels)), shape=shape)
    yield "", (train_seconds, predict_seconds), _megabytes(out / "model"), matrix


def _write_text(path: Path, x: Any, y: Any) -> None:
    """Write the points with labels and features in the format of the XMC repository."""
    rows = [i for i in range(x.shape[0]) if x.indptr[i] < x.indptr[i + 1] and y[i].nnz]
    with path.open("w", encoding="utf8") as file:
        file.write(f"{len(rows)} {x.shape[1]} {y.shape[1]}\n")
        for i in rows:
            labels = ",".join(map(str, y.indices[y.indptr[i] : y.indptr[i + 1]].tolist()))
            span = slice(x.indptr[i], x.indptr[i + 1])
            pairs = zip(x.indices[span].tolist(), x.data[span].tolist())  # noqa: B905
            file.write(f"{labels} {' '.join(f'{k}:{v:.8g}' for k, v in pairs)}\n")


def _xr_linear(
    job: dict[str, Any], train_x: Any, train_y: Any, test_x: Any, out: Path
) -> Iterator[tuple[str, tuple[float, float], float, Any]]:
    """Train XR-Linear models on different clusterings. Yield the first alone and their average."""
    xmc = importlib.import_module("pecos.xmc")
    linear = importlib.import_module("pecos.xmc.xlinear.model").XLinearModel
    train_seconds = predict_seconds = megabytes = 0.0
    total: Any = None
    for number, seed in enumerate(job["seeds"], start=1):
        start = time.perf_counter()
        centroids = xmc.LabelEmbeddingFactory.create(train_y, train_x, method="pifa")
        clusters = xmc.Indexer.gen(centroids, seed=seed)
        model = linear.train(train_x, train_y.tocsc(), C=clusters)
        train_seconds += time.perf_counter() - start
        model.save(str(out / f"model{seed}"))
        megabytes += _megabytes(out / f"model{seed}")
        start = time.perf_counter()
        scores = model.predict(test_x, only_topk=job["top_k"])
        predict_seconds += time.perf_counter() - start
        total = scores if total is None else total + scores
        if number in (1, len(job["seeds"])):
            name = "" if number == 1 else f"x{number}"
            yield name, (train_seconds, predict_seconds), megabytes, total / number


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    """Run the command line."""
    del sys.path[0]  # the modules beside this script must not hide modules of a baseline
    command, argument, result = sys.argv[1:]
    if command == "probe":
        done = probe(argument)
    else:
        done = run(json.loads(Path(argument).read_text("utf8")))
    Path(result).write_text(json.dumps(done), encoding="utf8")


if __name__ == "__main__":
    main()
