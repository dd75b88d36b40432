"""Tables 1 and 2: the model beside one-vs-all, nearest neighbours and linear peers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from elias.baselines import NearestNeighbours
from elias.baselines.knn import NEIGHBOURS
from elias.experiments import peers as features_of
from elias.experiments.models import Models, OwnModel, judged
from elias.experiments.peers import (
    METHODS,
    PEER_TITLES,
    Answer,
    Peer,
    PeerData,
    PeerFailedError,
    find_peers,
)
from elias.experiments.plots import beside
from elias.experiments.runner import Plan, Task
from elias.experiments.tables import MEGABYTES, MS_PER_POINT, TRAIN_SECONDS, Row, Table
from elias.experiments.variants import Twin, one_vs_all_twin
from elias.inference.predict import CALIBRATE, ENSEMBLE, NAMES, RERANK
from elias.inference.predictor import EVALUATED

if TYPE_CHECKING:
    from elias.config import ResolvedConfig
    from elias.experiments.peers import PointFeatures
    from elias.experiments.runner import Setting


COSTS = (TRAIN_SECONDS, MS_PER_POINT, MEGABYTES)
COLUMNS = (
    *("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@20", "R@100"),
    *COSTS,
)
SHOWN = ("P@1", "P@5", "R@100", *COSTS)
PEER_SEEDS = 3
"""Clusterings of XR-Linear that are averaged in its ensemble."""
_EXCHANGE = ".peer-"  # how the folders begin in which peers find their data


def compare(
    setting: Setting,
    *,
    members: int | None = None,
    interpreters: Mapping[str, Path] | None = None,
    ranker_features: bool = False,
) -> Plan:
    """Plan the comparison of the model, component by component, with what else there is.

    Args:
        setting: What to train on what.
        members: Of the ensemble; 1: none. By default as many as the configuration has.
        interpreters: For a peer's package, the interpreter that has it; our own by default.
        ranker_features: Let the peers read our ranker's features too, beside tf-idf of words.
    """
    config, models = setting.config, Models(setting)
    members = config.ensemble.members if members is None else members
    ours = OwnModel(
        setting=setting,
        models=models,
        members=members,
        title=_titles(config, members).__getitem__,
        stages=False,
        timed=True,
    )
    parts: list[OwnModel | Twin] = [ours]
    if config.index.kind != "all":
        parts.append(one_vs_all_twin(setting, models, timed=True))
    for seed in setting.seeds:
        for part in parts:
            models.check(part.runs(seed))
    kinds = (features_of.WORDS, *((features_of.RANKER,) if ranker_features else ()))
    peers = _Peers(setting, find_peers(interpreters or {}))
    tasks = [task for seed in setting.seeds for part in parts for task in part.tasks(seed)]
    tasks.append(_neighbours(setting))
    tasks += [
        peers.task(method, kind, seed)
        for kind in kinds
        for seed in setting.seeds
        for method in METHODS
    ]
    return Plan(
        name="compare",
        title="The model beside others (Tables 1 and 2)",
        setting=setting,
        tasks=tasks,
        table=Table(heading="method", columns=COLUMNS, shown=SHOWN),
        plot=lambda lines: beside(lines, "The model beside others", ("P@1", "P@5", "R@100")),
        options={
            "members": members,
            "peers": {name: peer.version for name, peer in peers.peers.items()},
            "features": list(kinds),
        },
        remarks=[
            "Times go from texts to labels, features and all. Peers read tf-idf of words unless "
            "said otherwise, and train on the validation points too.",
            *_remarks(peers.peers),
        ],
    )


def _remarks(peers: Mapping[str, Peer]) -> list[str]:
    said = {
        "omikuji": "Parabel and Bonsai are those of omikuji {}, with 3 trees.",
        "pecos": "XR-Linear is that of PECOS {}, its defaults (×3: three clusterings averaged).",
    }
    return [
        said[name].format(peer.version) for name, peer in peers.items() if peer.version is not None
    ]


def _titles(config: ResolvedConfig, members: int) -> dict[str, str]:
    name = "one-vs-all" if config.index.kind == "all" else "ELIAS"
    whole = f"{name}++" if config.rerank.enabled else name
    named = " with label names" if _names_labels(config) else ""
    return {
        config.stages[-1].name: name,
        RERANK: f"{name} + ranker",
        CALIBRATE: f"{name}++ (+ calibration)",
        NAMES: f"{name}++ with label names",
        ENSEMBLE: f"{whole}{named} ×{members}",
    }


def _names_labels(config: ResolvedConfig) -> bool:
    return bool(config.rerank.enabled) and config.rerank.calibrate and config.rerank.names


def _neighbours(setting: Setting) -> Task:
    """Return the task of the nearest neighbours, in which nothing is drawn at random."""

    def measure() -> list[Row]:
        begin = time.perf_counter()
        neighbours = NearestNeighbours(setting.corpus)
        trained = time.perf_counter() - begin
        test = setting.corpus.split("test")
        found = neighbours.predict_split(test, top_k=EVALUATED)
        predicted = time.perf_counter() - begin - trained
        return [
            Row(
                name="knn",
                title=f"kNN-{NEIGHBOURS}",
                metrics=judged(found, setting),
                costs=_costs(trained, predicted, neighbours.n_bytes / 1e6, len(test)),
            )
        ]

    return Task(
        name="knn",
        title="nearest neighbours",
        decided_by={"k": NEIGHBOURS, "eval": setting.config.to_dict()["eval"]},
        measure=measure,
    )


def _costs(trained: float, predicted: float, megabytes: float, n_points: int) -> dict[str, float]:
    return {
        TRAIN_SECONDS: round(trained, 3),
        MS_PER_POINT: round(1000 * predicted / max(n_points, 1), 4),
        MEGABYTES: round(megabytes, 3),
    }


class _Peers:
    """The linear peers, and the features that they read."""

    def __init__(self, setting: Setting, peers: Mapping[str, Peer]) -> None:
        self.setting = setting
        self.peers = peers
        self.features = lru_cache(maxsize=1)(self._features)

    def _features(self, kind: str) -> PointFeatures:
        return features_of.point_features(self.setting, kind)

    def task(self, method: str, kind: str, seed: int) -> Task:
        """Return the task of one method on one kind of features."""
        peer = self.peers[METHODS[method]]
        return Task(
            name=f"{method}-{kind}-seed{seed}",
            title=f"{PEER_TITLES[method]}{features_of.TITLES[kind]}, seed {seed}",
            decided_by={
                "peer": [peer.package, peer.version],
                "method": method,
                "features": [kind, self.setting.config.to_dict()["rerank"]],
                "eval": self.setting.config.to_dict()["eval"],
                "seed": seed,
            },
            measure=lambda: self._measure(method, kind, seed),
        )

    def _measure(self, method: str, kind: str, seed: int) -> list[Row]:
        peer = self.peers[METHODS[method]]
        if peer.version is None:
            return [self._row(method, kind, seed, note=peer.why_missing)]
        try:
            answers = self._ask(method, kind, seed, peer)
        except PeerFailedError as failure:
            return [self._row(method, kind, seed, note=f"failed: {failure}")]
        return [self._measured(method, kind, seed, answer) for answer in answers]

    def _ask(self, method: str, kind: str, seed: int, peer: Peer) -> list[Answer]:
        made, corpus = self.features(kind), self.setting.corpus
        filters = corpus.split("test").filters
        most = 0 if filters is None else int(np.bincount(filters[:, 0], minlength=1).max())
        seeds = [PEER_SEEDS * seed + i for i in range(PEER_SEEDS)]
        for left in self.setting.folder.glob(f"{_EXCHANGE}*"):
            shutil.rmtree(left, ignore_errors=True)  # of a command that was killed
        with TemporaryDirectory(prefix=_EXCHANGE, dir=self.setting.folder) as folder:
            data = PeerData.write(corpus, (made.train, made.test), Path(folder), EVALUATED + most)
            return data.ask(method, peer, seeds)

    def _measured(self, method: str, kind: str, seed: int, answer: Answer) -> Row:
        test, made = self.setting.corpus.split("test"), self.features(kind)
        found = answer.found if test.filters is None else answer.found.drop(test.filters)
        costs = _costs(
            made.train_seconds + answer.train_seconds,
            made.test_seconds + answer.predict_seconds,
            answer.megabytes,
            len(test),
        )
        row = self._row(method, kind, seed, part=answer.name)
        return replace(row, metrics=judged(found, self.setting), costs=costs)

    def _row(self, method: str, kind: str, seed: int, *, part: str = "", note: str = "") -> Row:
        peer = self.peers[METHODS[method]]
        name = f"{method}{f'-{part}' if part else ''}/{kind}"
        times = f" {part.replace('x', '×')}" if part else ""
        return Row(
            name=name,
            title=f"{PEER_TITLES[method]}{times}{features_of.TITLES[kind]}",
            seed=seed,
            settings={"peer": peer.package, "version": peer.version, "features": kind},
            note=note,
        )
