"""Trains and asks one peer, in an environment of its own, where neither elias nor torch need be.

    python run_peer.py probe PACKAGE RESULT     writes the version of the package
    python run_peer.py run JOB RESULT           does a job and writes how it went

Both are JSON files. A job names matrices as scipy saves them, and what comes back does so too.
Peers may print what they like.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {"omikuji": "omikuji", "pecos": "libpecos"}
MODULES = {"omikuji": "omikuji", "pecos": "pecos.xmc.xlinear.model"}
TREES = 3
"""Of Parabel and Bonsai, as their papers have it."""
BONSAI = {"cluster_balanced": False, "cluster_k": 100, "max_depth": 3}


def probe(package: str) -> dict[str, Any]:
    """Return the version of a peer that can be imported."""
    importlib.import_module(MODULES[package])
    return {"version": importlib.metadata.version(DISTRIBUTIONS[package])}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train a peer and predict with it; return how long both took, its size and its answers."""
    sparse = importlib.import_module("scipy.sparse")
    matrices = {
        name: sparse.load_npz(job[name]).tocsr().astype("float32")
        for name in ("train_x", "train_y", "test_x")
    }
    out = Path(job["out"])
    method = {"parabel": _omikuji, "bonsai": _omikuji, "xr-linear": _xr_linear}[job["method"]]
    return {"parts": method(job, matrices, out)}


def _omikuji(job: dict[str, Any], matrices: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Train label trees and predict point by point, as its interface has it."""
    omikuji = importlib.import_module("omikuji")
    data = out / "train.txt"
    _write_text(data, matrices["train_x"], matrices["train_y"])
    parameters = omikuji.Model.default_hyper_param()
    parameters.n_trees = TREES
    for name, value in BONSAI.items() if job["method"] == "bonsai" else ():
        setattr(parameters, name, value)
    begin = time.perf_counter()
    model = omikuji.Model.train_on_data(str(data), parameters)
    trained = time.perf_counter() - begin
    model.save(str(out / "model"))
    x = matrices["test_x"]
    begin = time.perf_counter()
    answers = [
        model.predict(
            list(zip(x.indices[a:b].tolist(), x.data[a:b].tolist())),  # noqa: B905 - for Python 3.9
            top_k=job["top_k"],
        )
        for a, b in zip(x.indptr, x.indptr[1:])  # noqa: B905 - for Python 3.9
    ]
    predicted = time.perf_counter() - begin
    found = _matrix(answers, matrices["train_y"].shape[1])
    return [_part("", trained, predicted, _size(out / "model"), found, out)]


def _write_text(path: Path, x: Any, y: Any) -> None:
    """Write points in the format of the XMC repository; those without label or feature go."""
    rows = [i for i in range(x.shape[0]) if x.indptr[i] < x.indptr[i + 1] and y[i].nnz]
    with path.open("w", encoding="utf8") as file:
        file.write(f"{len(rows)} {x.shape[1]} {y.shape[1]}\n")
        for i in rows:
            labels = ",".join(map(str, y.indices[y.indptr[i] : y.indptr[i + 1]].tolist()))
            span = slice(x.indptr[i], x.indptr[i + 1])
            pairs = zip(x.indices[span].tolist(), x.data[span].tolist())  # noqa: B905
            file.write(f"{labels} {' '.join(f'{k}:{v:.8g}' for k, v in pairs)}\n")


def _matrix(answers: list[Any], n_labels: int) -> Any:
    """Return lists of (label, score) as a matrix of scores."""
    sparse = importlib.import_module("scipy.sparse")
    ends = [0]
    for answer in answers:
        ends.append(ends[-1] + len(answer))
    labels = [int(label) for answer in answers for label, _ in answer]
    scores = [float(score) for answer in answers for _, score in answer]
    return sparse.csr_matrix((scores, labels, ends), shape=(len(answers), n_labels))


def _xr_linear(job: dict[str, Any], matrices: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Train XR-Linear with its defaults, once, and with several clustering seeds averaged."""
    parts = []
    trained = predicted = size = 0.0
    total: Any = None
    for number, seed in enumerate(job["seeds"], start=1):
        model, seconds = _train_xr_linear(matrices, seed)
        trained += seconds
        model.save(str(out / f"model{seed}"))
        size += _size(out / f"model{seed}")
        begin = time.perf_counter()
        found = model.predict(matrices["test_x"], only_topk=job["top_k"])
        predicted += time.perf_counter() - begin
        total = found if total is None else total + found
        if number in (1, len(job["seeds"])):
            name = "" if number == 1 else f"x{number}"
            parts.append(_part(name, trained, predicted, size, total / number, out))
    return parts


def _train_xr_linear(matrices: dict[str, Any], seed: int) -> tuple[Any, float]:
    xmc = importlib.import_module("pecos.xmc")
    model = importlib.import_module("pecos.xmc.xlinear.model").XLinearModel
    x, y = matrices["train_x"], matrices["train_y"]
    begin = time.perf_counter()
    centroids = xmc.LabelEmbeddingFactory.create(y, x, method="pifa")
    clusters = xmc.Indexer.gen(centroids, seed=seed)
    trained = model.train(x, y.tocsc(), C=clusters)
    return trained, time.perf_counter() - begin


def _part(
    name: str, trained: float, predicted: float, size: float, found: Any, out: Path
) -> dict[str, Any]:
    sparse = importlib.import_module("scipy.sparse")
    path = out / f"found{name}.npz"
    sparse.save_npz(path, sparse.csr_matrix(found))
    return {
        "name": name,
        "train_seconds": trained,
        "predict_seconds": predicted,
        "megabytes": size,
        "found": str(path),
    }


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    """Do what the command line says."""
    verb, given, result = sys.argv[1:]
    done = probe(given) if verb == "probe" else run(json.loads(Path(given).read_text("utf8")))
    Path(result).write_text(json.dumps(done), encoding="utf8")


if __name__ == "__main__":
    main()
