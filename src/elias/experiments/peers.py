"""Run Parabel, Bonsai and XR-Linear on the same data, each in its own Python interpreter."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, issparse, load_npz, save_npz

from elias.errors import ConfigError, did_you_mean
from elias.inference.predictor import EVALUATED
from elias.predictions import Predictions
from elias.progress import progress
from elias.rerank import RankerFeatures
from elias.text.vectorizer import Featurizer, unit_rows

if TYPE_CHECKING:
    from elias.experiments.runner import Setting


logger = logging.getLogger(__name__)

WORDS, RANKER = "words", "ranker"
FEATURES = {WORDS: "", RANKER: ", our features"}
"""Kinds of features, with the suffix that each adds to row titles."""
PACKAGES = {"omikuji": "omikuji", "pecos": "libpecos"}
"""Import name of each peer package, with its name on PyPI."""
METHODS = {"parabel": "omikuji", "bonsai": "omikuji", "xr-linear": "pecos"}
"""Methods, with the peer package that implements each."""
PEER_TITLES = {"parabel": "Parabel", "bonsai": "Bonsai", "xr-linear": "XR-Linear"}
_SCRIPT = Path(__file__).with_name("run_peer.py")
_FOLDER_PREFIX = ".peer-"
_MAX_MESSAGE = 160


@dataclass(frozen=True, slots=True)
class PointFeatures:
    """Features of the training and test points, with the time to compute each."""

    train: csr_matrix
    test: csr_matrix
    train_seconds: float
    test_seconds: float


def point_features(setting: Setting, kind: str) -> PointFeatures:
    """Compute word tf-idf or the sparse features of the ranker (without embeddings).

    If the corpus has features instead of texts, only scale each row to unit length.
    """
    splits = [setting.corpus.split(name) for name in ("train", "test")]
    points: list[Any] = [s.features if s.texts is None else s.texts for s in splits]
    train, test = points
    start = time.perf_counter()
    transform: Callable[[Any], csr_matrix]
    if issparse(train):
        transform = unit_rows
    elif kind == WORDS:
        transform = Featurizer.fit(train, char_ngrams=(0, 0), min_count=1).transform
    else:
        transform = RankerFeatures.fit(train, setting.config.rerank).transform
    train_features = transform(train)
    middle = time.perf_counter()
    test_features = transform(test)
    end = time.perf_counter()
    return PointFeatures(train_features, test_features, middle - start, end - middle)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer package, and the Python interpreter in which it is installed."""

    package: str
    python: Path
    version: str | None
    """Version of the package; None if it cannot be imported."""

    @property
    def missing(self) -> str:
        """Return the note for rows without numbers: the package was not found."""
        return (
            f"{PACKAGES[self.package]} not found; name an interpreter that has it: "
            f"--peer-python {self.package}=PATH"
        )


class PeerFailedError(Exception):
    """A peer exited with an error; the message is its last line of output."""


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Predictions of a peer for the test points, with training time, prediction time and size."""

    name: str
    """Empty for a single model; ``x3`` for an ensemble of three."""
    predictions: Predictions
    train_seconds: float
    predict_seconds: float
    megabytes: float


def parse_interpreters(options: list[str]) -> dict[str, Path]:
    """Parse ``package=PATH`` pairs.

    Raises:
        ConfigError: If the package is not a peer, or the path is not an executable file.
    """
    interpreters = {}
    for text in options:
        package, equals, path = text.partition("=")
        if not equals or package not in PACKAGES:
            raise ConfigError(
                f"--peer-python {text!r}: write it as PACKAGE=PATH, the package one of "
                f"{', '.join(PACKAGES)}{did_you_mean(package, PACKAGES)}"
            )
        python = Path(path).expanduser()
        if not python.is_file() or not os.access(python, os.X_OK):
            raise ConfigError(f"--peer-python {text!r}: {path} is no program; give a python")
        interpreters[package] = python
    return interpreters


def find_peers(interpreters: Mapping[str, Path]) -> dict[str, Peer]:
    """Look up each package in its interpreter, which defaults to the current one."""
    peers = {}
    for package in PACKAGES:
        python = interpreters.get(package, Path(sys.executable))
        with TemporaryDirectory() as folder:
            try:
                version = _call(python, "probe", package, Path(folder))["version"]
            except PeerFailedError as failure:
                logger.debug("%s: %s", python, failure)
                version = None
        peers[package] = Peer(package, python, version)
    return peers


def run_peer(
    peer: Peer, method: str, features: PointFeatures, setting: Setting, seeds: list[int]
) -> list[PeerResult]:
    """Train a method of a peer, predict the test points and drop the filtered pairs.

    Raises:
        PeerFailedError: If the peer ends with an error.
    """
    corpus, filters = setting.corpus, setting.corpus.split("test").filters
    n_filtered = 0 if filters is None else int(np.bincount(filters[:, 0], minlength=1).max())
    top_k = EVALUATED + n_filtered
    for stale in setting.folder.glob(f"{_FOLDER_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)  # left by a command that was killed
    with (
        TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=setting.folder) as out,
        progress(f"Running {PEER_TITLES[method]}"),
    ):
        folder = Path(out)
        job: dict[str, Any] = {"method": method, "seeds": seeds, "top_k": top_k, "out": out}
        matrices = {
            "train_x": features.train,
            "train_y": corpus.train.labels,
            "test_x": features.test,
        }
        for name, matrix in matrices.items():
            plain = csr_matrix(matrix, copy=True)
            plain.sort_indices()
            job[name] = str(folder / f"{name}.npz")
            save_npz(job[name], plain, compressed=False)
        path = folder / "job.json"
        path.write_text(json.dumps(job), encoding="utf8")
        results = []
        for part in _call(peer.python, "run", str(path), folder)["parts"]:
            scores = load_npz(part.pop("scores"))
            predictions = Predictions.from_csr(scores, top_k, corpus.label_names)
            if filters is not None:
                predictions = predictions.drop(filters)
            results.append(PeerResult(predictions=predictions, **part))
        return results


def _call(python: Path, command: str, argument: str, folder: Path) -> dict[str, Any]:
    """Run ``run_peer.py`` with an interpreter and return its result."""
    # the import path of our interpreter is not that of the peer
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    result = folder / "result.json"
    try:
        done = subprocess.run(
            [str(python), str(_SCRIPT), command, argument, str(result)],
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
