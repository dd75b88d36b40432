"""Tables 1 and 2: compare the model with one-vs-all, nearest neighbours and linear baselines.

The linear baselines (Parabel, Bonsai and XR-Linear) run on the same data. Each package can have its
own Python interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scipy.sparse import csr_matrix, load_npz, save_npz

from elias.baselines import NearestNeighbours
from elias.baselines.knn import NEIGHBOURS
from elias.config import ResolvedConfig
from elias.errors import ConfigError, did_you_mean
from elias.experiments import external_baseline
from elias.experiments.runner import COSTS, Plan, Row, Setting, Table, Task, dot_plot
from elias.experiments.variants import Models, one_vs_all
from elias.inference.predict import ENSEMBLE
from elias.metrics import EVALUATED
from elias.predictions import Predictions
from elias.progress import progress
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK
from elias.rerank.sparse_ranker import RankerFeatures
from elias.text.vectorizer import Featurizer, unit_rows

Timed = tuple[csr_matrix, float]
"""The features of points, and the seconds needed to compute them."""


logger = logging.getLogger(__name__)

METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@20", "R@100")
SHOWN = ("P@1", "P@5", "R@100")
WORDS, RANKER = "words", "ranker"
FEATURES = {WORDS: "", RANKER: ", our features"}
"""Suffix of row titles for each kind of features."""
PEER_TITLES = {"parabel": "Parabel", "bonsai": "Bonsai", "xr-linear": "XR-Linear"}
PEER_SEEDS = 3
"""Size of the XR-Linear ensemble. Each model has a different clustering."""
_PEER_REMARKS = {
    "omikuji": "Parabel and Bonsai are from omikuji {}, with 3 trees.",
    "pecos": "XR-Linear is from PECOS {}, with defaults (×3: the average over three clusterings).",
}
_FOLDER_PREFIX = ".peer-"
_MAX_MESSAGE = 160


def compare(
    setting: Setting,
    *,
    members: int | None = None,
    interpreters: Mapping[str, Path] | None = None,
    ranker_features: bool = False,
) -> Plan:
    """Plan the comparison of each component of the model with other methods.

    Args:
        setting: Configuration, corpus, seeds and folder.
        members: Ensemble size; 1 for no ensemble. Defaults to the size in the configuration.
        interpreters: Path of the Python interpreter for each baseline package. Defaults to the
            current interpreter.
        ranker_features: Run the linear baselines on the sparse features of the ELIAS ranker, in
            addition to word tf-idf.
    """
    config, models = setting.config, Models(setting, timed=True)
    members = config.ensemble.members if members is None else members
    tasks = []
    for seed in setting.seeds:
        tasks += models.full_model_tasks(seed, members, _titles(config, members))
        if config.index.kind != "all":
            tasks.append(models.variant_task(seed, "one-vs-all", "one-vs-all", one_vs_all))
    tasks.append(_neighbours_task(models))
    pythons = dict.fromkeys(external_baseline.DISTRIBUTIONS, Path(sys.executable)) | dict(
        interpreters or {}
    )
    versions = {package: _find_version(python, package) for package, python in pythons.items()}
    features = lru_cache(maxsize=1)(partial(_point_features, setting))
    kinds = [WORDS, RANKER] if ranker_features else [WORDS]
    for kind, seed in product(kinds, setting.seeds):
        for method, package in external_baseline.METHODS.items():
            peer = pythons[package], versions[package]
            tasks.append(_peer_task(models, method, *peer, kind, seed, features))
    remarks = [
        "Times include the computation of features. Linear baselines use word tf-idf unless stated "
        "otherwise, and train on the validation points too."
    ]
    remarks += [
        _PEER_REMARKS[peer].format(version) for peer, version in versions.items() if version
    ]
    return Plan(
        name="compare",
        title="Comparison with other methods (Tables 1 and 2)",
        setting=setting,
        tasks=tasks,
        table=Table("method", columns=(*METRICS, *COSTS), shown=(*SHOWN, *COSTS)),
        plot=lambda lines: dot_plot(lines, "Comparison of methods", SHOWN),
        options={"members": members, "peers": versions, "features": kinds},
        remarks=remarks,
    )


def _titles(config: ResolvedConfig, members: int) -> dict[str, str]:
    """Return the row title of each component of the model."""
    name = "one-vs-all" if config.index.kind == "all" else "ELIAS"
    rerank = config.rerank
    complete = f"{name}++" if rerank.enabled else name
    with_names = rerank.enabled and rerank.calibrate and rerank.names
    return {
        config.stages[-1].name: name,
        RERANK: f"{name} + ranker",
        CALIBRATE: f"{name}++ (+ calibration)",
        NAMES: f"{name}++ with label names",
        ENSEMBLE: f"{complete}{' with label names' if with_names else ''} ×{members}",
    }


def _neighbours_task(models: Models) -> Task:
    """Return the task that measures the nearest-neighbour baseline, which needs no seed."""
    setting = models.setting

    def measure() -> list[Row]:
        start = time.perf_counter()
        neighbours = NearestNeighbours(setting.corpus)
        middle = time.perf_counter()
        predictions = neighbours.predict_split(setting.corpus.split("test"), top_k=EVALUATED)
        end = time.perf_counter()
        costs = _costs(setting, middle - start, end - middle, neighbours.n_bytes / 1e6)
        metrics = models.evaluate(predictions)
        return [Row(name="knn", title=f"kNN-{NEIGHBOURS}", metrics=metrics, costs=costs)]

    return Task("knn", "nearest neighbours", measure)


def _costs(
    setting: Setting, train_seconds: float, predict_seconds: float, megabytes: float
) -> dict[str, float]:
    milliseconds = 1000 * predict_seconds / max(len(setting.corpus.split("test")), 1)
    values = (round(train_seconds, 3), round(milliseconds, 4), round(megabytes, 3))
    return dict(zip(COSTS, values, strict=True))


def _point_features(setting: Setting, kind: str) -> tuple[Timed, Timed]:
    """Compute the word tf-idf, or the ranker's sparse features, of the training and test points.

    If the corpus has features instead of texts, each row is only scaled to unit length.
    """
    train, test = (setting.corpus.split(name) for name in ("train", "test"))
    start = time.perf_counter()
    points: list[Any] = [train.features, test.features]
    transform: Callable[[Any], csr_matrix] = unit_rows
    if train.texts is not None:
        points = [train.texts, test.texts]
        if kind == WORDS:
            transform = Featurizer.fit(train.texts, char_ngrams=(0, 0), min_count=1).transform
        else:
            transform = RankerFeatures.fit(train.texts, setting.config.rerank).transform
    train_features = transform(points[0])
    middle = time.perf_counter()
    test_features = transform(points[1])
    return (train_features, middle - start), (test_features, time.perf_counter() - middle)


class PeerFailedError(Exception):
    """Raised if a baseline exits with an error. The message is its last line of output."""


def parse_interpreters(options: list[str]) -> dict[str, Path]:
    """Parse ``package=PATH`` options. Return the path of the interpreter for each package.

    Raises:
        ConfigError: If a package is not a baseline package, or a path is not an executable file.
    """
    interpreters, packages = {}, external_baseline.DISTRIBUTIONS
    for text in options:
        package, equals, path = text.partition("=")
        if not equals or package not in packages:
            raise ConfigError(
                f"--peer-python {text!r}: write PACKAGE=PATH, where PACKAGE is one of "
                f"{', '.join(packages)}{did_you_mean(package, packages)}"
            )
        python = Path(path).expanduser()
        if not python.is_file() or not os.access(python, os.X_OK):
            raise ConfigError(
                f"--peer-python {text!r}: {path} is not a Python interpreter; give the path of an "
                "executable file"
            )
        interpreters[package] = python
    return interpreters


def _find_version(python: Path, package: str) -> str | None:
    """Return the version of a baseline package, or None if the interpreter cannot import it."""
    with TemporaryDirectory() as folder:
        try:
            return str(_call(python, "probe", package, Path(folder))["version"])
        except PeerFailedError as failure:
            logger.debug("%s: %s", python, failure)
            return None


def _peer_task(
    models: Models,
    method: str,
    python: Path,
    version: str | None,
    kind: str,
    seed: int,
    features: Callable[[str], tuple[Timed, Timed]],
) -> Task:
    """Return the task that measures one baseline on one kind of features."""
    setting, package = models.setting, external_baseline.METHODS[method]
    title = f"{PEER_TITLES[method]}{{}}{FEATURES[kind]}"
    settings = {"peer": package, "version": version, "features": kind}
    empty = Row(name=f"{method}/{kind}", title=title.format(""), seed=seed, settings=settings)

    def measure() -> list[Row]:
        if version is None:
            remedy = f"give an interpreter that has it: --peer-python {package}=PATH"
            distribution = external_baseline.DISTRIBUTIONS[package]
            return [replace(empty, note=f"{distribution} not found; {remedy}")]
        (train, train_seconds), (test, test_seconds) = features(kind)
        rows = []
        try:
            for part, predictions in _run(python, method, train, test, setting, seed):
                name = part["name"]  # empty for a single model; x3 for an ensemble of three
                times = (
                    train_seconds + part["train_seconds"],
                    test_seconds + part["predict_seconds"],
                )
                row = replace(
                    empty,
                    name=f"{method}-{name}/{kind}" if name else empty.name,
                    title=title.format(f" ×{name[1:]}" if name else ""),
                    metrics=models.evaluate(predictions),
                    costs=_costs(setting, *times, part["megabytes"]),
                )
                rows.append(row)
        except PeerFailedError as failure:
            return [replace(empty, note=f"failed: {failure}")]
        return rows

    name = f"{method}-{version}-{kind}-seed{seed}"
    return Task(name, f"{empty.title}, seed {seed}", measure)


def _run(
    python: Path, method: str, train: csr_matrix, test: csr_matrix, setting: Setting, seed: int
) -> Iterator[tuple[dict[str, Any], Predictions]]:
    """Train a baseline, and yield the times, size and test predictions of each of its models.

    Raises:
        PeerFailedError: If the baseline exits with an error.
    """
    corpus = setting.corpus
    top_k = EVALUATED + corpus.split("test").max_filtered
    seeds = [PEER_SEEDS * seed + i for i in range(PEER_SEEDS)]
    for stale in setting.folder.glob(f"{_FOLDER_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)  # left behind by a command that was killed
    with (
        TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=setting.folder) as out,
        progress(f"Running {PEER_TITLES[method]}"),
    ):
        folder = Path(out)
        job: dict[str, Any] = {"method": method, "seeds": seeds, "top_k": top_k, "out": out}
        matrices = {"train_x": train, "train_y": corpus.train.labels, "test_x": test}
        for name, matrix in matrices.items():
            job[name] = str(folder / f"{name}.npz")
            save_npz(job[name], csr_matrix(matrix).sorted_indices(), compressed=False)
        path = folder / "job.json"
        path.write_text(json.dumps(job), encoding="utf8")
        for part in _call(python, "run", str(path), folder)["parts"]:
            yield part, Predictions.from_csr(load_npz(part["scores"]), top_k, corpus.label_names)


def _call(python: Path, command: str, argument: str, folder: Path) -> dict[str, Any]:
    """Run ``external_baseline.py`` with an interpreter and return its result."""
    # the interpreter of the baseline must not use our import path
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    result = folder / "result.json"
    try:
        done = subprocess.run(
            [str(python), external_baseline.__file__, command, argument, str(result)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise PeerFailedError(f"{python}: {error.strerror}") from error
    if done.returncode != 0 or not result.exists():
        last = (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PeerFailedError(last[:_MAX_MESSAGE])
    content: dict[str, Any] = json.loads(result.read_text(encoding="utf8"))
    return content
