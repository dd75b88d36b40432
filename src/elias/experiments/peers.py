"""Run other programs on the same data."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from scipy.sparse import csr_matrix, issparse, load_npz, save_npz

from elias.errors import ConfigError, did_you_mean
from elias.predictions import Predictions
from elias.progress import progress
from elias.rerank.features import RankerFeatures
from elias.text.vectorizer import Featurizer, unit_rows

if TYPE_CHECKING:
    from elias.data.corpus import Corpus, Split
    from elias.experiments.runner import Setting


logger = logging.getLogger(__name__)

WORDS, RANKER = "words", "ranker"
TITLES = {WORDS: "", RANKER: ", our features"}
"""What is said of a peer that reads them."""


@dataclass(frozen=True, slots=True)
class PointFeatures:
    """Features of the training and the test points, and how long making them took."""

    train: csr_matrix
    test: csr_matrix
    train_seconds: float
    test_seconds: float


def point_features(setting: Setting, kind: str) -> PointFeatures:
    """Return tf-idf of words, or what our ranker reads but for φ; given features stay."""
    train, test = (_given(setting.corpus.split(name)) for name in ("train", "test"))
    begin = time.perf_counter()
    transform = _fitted(train, kind, setting)
    of_train = transform(train)
    middle = time.perf_counter()
    of_test = transform(test)
    return PointFeatures(of_train, of_test, middle - begin, time.perf_counter() - middle)


def _fitted(
    train: Sequence[str] | csr_matrix, kind: str, setting: Setting
) -> Callable[[Any], csr_matrix]:
    if issparse(train):
        return unit_rows
    if kind == WORDS:
        return Featurizer.fit(train, char_ngrams=(0, 0), min_count=1).transform
    return RankerFeatures.fit(train, setting.config.rerank).transform


def _given(split: Split) -> Sequence[str] | csr_matrix:
    if split.texts is not None:
        return split.texts
    assert split.features is not None, "a split has texts or features"
    return split.features


PACKAGES = {"omikuji": "omikuji", "pecos": "libpecos"}
"""Peers by the name their interpreter is given under, and what pip calls them."""
METHODS = {"parabel": "omikuji", "bonsai": "omikuji", "xr-linear": "pecos"}
"""What is run, and by which peer."""
PEER_TITLES = {"parabel": "Parabel", "bonsai": "Bonsai", "xr-linear": "XR-Linear"}
_SCRIPT = Path(__file__).parent / "peer_scripts" / "run_peer.py"
_LAST_LINE = 160


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's package, and the interpreter that has it."""

    package: str
    python: Path
    version: str | None
    """None where it cannot be imported."""

    @property
    def why_missing(self) -> str:
        """Return what is said in the place of its numbers."""
        return (
            f"{PACKAGES[self.package]} not found; name an interpreter that has it: "
            f"--peer-python {self.package}=PATH"
        )


class PeerFailedError(Exception):
    """A peer that did not come to its end; the text is the last thing it said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer predicted for the test points, and at what cost."""

    name: str
    """Which of several answers of one method, e.g. ``x3``; empty for the plain one."""
    found: Predictions
    train_seconds: float
    predict_seconds: float
    megabytes: float


def parse_interpreters(given: list[str]) -> dict[str, Path]:
    """Read ``package=PATH`` pairs.

    Raises:
        ConfigError: If the package is no peer, or there is no such interpreter.
    """
    found = {}
    for text in given:
        package, equals, path = text.partition("=")
        if not equals or package not in PACKAGES:
            raise ConfigError(
                f"--peer-python {text!r}: write it as PACKAGE=PATH, the package one of "
                f"{', '.join(PACKAGES)}{did_you_mean(package, PACKAGES)}"
            )
        python = Path(path).expanduser()
        if not python.is_file() or not os.access(python, os.X_OK):
            raise ConfigError(f"--peer-python {text!r}: {path} is no program; give a python")
        found[package] = python
    return found


def find_peers(interpreters: Mapping[str, Path]) -> dict[str, Peer]:
    """Look for each peer's package in its interpreter, or in our own where none is named."""
    peers = {}
    for package in PACKAGES:
        python = interpreters.get(package, Path(sys.executable))
        with TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            try:
                version = _call(python, "probe", package, result)["version"]
            except PeerFailedError as failure:
                logger.debug("%s: %s", python, failure)
                version = None
        peers[package] = Peer(package, python, version)
    return peers


@dataclass(frozen=True, slots=True)
class PeerData:
    """The matrices that peers read, written once for all of them."""

    corpus: Corpus
    folder: Path
    top_k: int

    @classmethod
    def write(
        cls, corpus: Corpus, features: tuple[csr_matrix, csr_matrix], folder: Path, top_k: int
    ) -> PeerData:
        """Write the features of training and test points, and the training labels."""
        train, test = features
        for name, matrix in (
            ("train_x", train),
            ("train_y", corpus.train.labels),
            ("test_x", test),
        ):
            plain = csr_matrix(matrix, copy=True)
            plain.sort_indices()
            save_npz(folder / f"{name}.npz", plain, compressed=False)
        return cls(corpus, folder, top_k)

    def ask(self, method: str, peer: Peer, seeds: list[int]) -> list[Answer]:
        """Run a method and return its answers.

        Raises:
            PeerFailedError: If the peer does not come to its end.
        """
        with TemporaryDirectory(dir=self.folder) as out, progress(f"Running {PEER_TITLES[method]}"):
            job = {
                name: str(self.folder / f"{name}.npz") for name in ("train_x", "train_y", "test_x")
            }
            path = Path(out) / "job.json"
            path.write_text(
                json.dumps(
                    {**job, "method": method, "seeds": seeds, "top_k": self.top_k, "out": out}
                ),
                encoding="utf8",
            )
            done = _call(peer.python, "run", str(path), Path(out) / "result.json")
            return [self._answer(part) for part in done["parts"]]

    def _answer(self, part: Mapping[str, Any]) -> Answer:
        matrix = load_npz(part["found"])
        return Answer(
            name=part["name"],
            found=Predictions.from_csr(matrix, self.top_k, self.corpus.label_names),
            train_seconds=part["train_seconds"],
            predict_seconds=part["predict_seconds"],
            megabytes=part["megabytes"],
        )


def _call(python: Path, verb: str, given: str, result: Path) -> dict[str, Any]:
    """Have an interpreter run the script, and return what it wrote."""
    # what our own interpreter was told to import is not the peer's
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            [str(python), str(_SCRIPT), verb, given, str(result)],
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
        raise PeerFailedError(last[:_LAST_LINE])
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf8"))
    return answer
