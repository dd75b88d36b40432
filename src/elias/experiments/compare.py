"""Tables 1 and 2: compare the model with one-vs-all, nearest neighbours and linear peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from elias.baselines import NearestNeighbours
from elias.baselines.knn import NEIGHBOURS
from elias.experiments.models import FullModel, Models, one_vs_all
from elias.experiments.peers import (
    FEATURES,
    METHODS,
    PEER_TITLES,
    RANKER,
    WORDS,
    Peer,
    PeerFailedError,
    PointFeatures,
    find_peers,
    point_features,
    run_peer,
)
from elias.experiments.runner import Plan, Task
from elias.experiments.tables import MEGABYTES, MS_PER_POINT, TRAIN_SECONDS, Row, Table, dot_plot
from elias.inference.predict import ENSEMBLE
from elias.inference.predictor import EVALUATED
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK

if TYPE_CHECKING:
    from pathlib import Path

    from elias.config import ResolvedConfig
    from elias.experiments.runner import Setting


COSTS = (TRAIN_SECONDS, MS_PER_POINT, MEGABYTES)
COLUMNS = (
    *("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@20", "R@100"),
    *COSTS,
)
SHOWN = ("P@1", "P@5", "R@100", *COSTS)
PEER_SEEDS = 3
"""Number of XR-Linear models, with different clusterings, averaged in its ensemble."""
_PEER_REMARKS = {
    "omikuji": "Parabel and Bonsai are those of omikuji {}, with 3 trees.",
    "pecos": "XR-Linear is that of PECOS {}, its defaults (×3: three clusterings averaged).",
}


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
        interpreters: Path of the Python interpreter for each peer package. Defaults to the current
            interpreter.
        ranker_features: Run the peers also on the sparse features of the ELIAS ranker, in addition
            to word tf-idf.
    """
    config, models = setting.config, Models(setting)
    members = config.ensemble.members if members is None else members
    titles = _titles(config, members)
    model = FullModel(models, members=members, titles=titles, every_stage=False, timed=True)
    tasks = []
    for seed in setting.seeds:
        tasks += model.tasks(seed)
        if config.index.kind != "all":
            variant = models.variant_task(seed, "one-vs-all", "one-vs-all", one_vs_all, timed=True)
            tasks.append(variant)
    tasks.append(_neighbours_task(models))
    peers = find_peers(interpreters or {})
    kinds = [WORDS, RANKER] if ranker_features else [WORDS]
    features = lru_cache(maxsize=1)(partial(point_features, setting))
    tasks += [
        _peer_task(models, peers[METHODS[method]], method, kind, seed, features)
        for kind in kinds
        for seed in setting.seeds
        for method in METHODS
    ]
    return Plan(
        name="compare",
        title="Comparison with other methods (Tables 1 and 2)",
        setting=setting,
        tasks=tasks,
        table=Table(heading="method", columns=COLUMNS, shown=SHOWN),
        plot=lambda lines: dot_plot(lines, "Comparison of methods", ("P@1", "P@5", "R@100")),
        options={
            "members": members,
            "peers": {name: peer.version for name, peer in peers.items()},
            "features": kinds,
        },
        remarks=[
            "Times include the computation of features. Peers read tf-idf of words unless stated "
            "otherwise, and train on the validation points too.",
            *(
                _PEER_REMARKS[name].format(peer.version)
                for name, peer in peers.items()
                if peer.version is not None
            ),
        ],
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
    """Return the task that measures nearest neighbours, which need no seed."""
    setting = models.setting

    def measure() -> list[Row]:
        start = time.perf_counter()
        neighbours = NearestNeighbours(setting.corpus)
        middle = time.perf_counter()
        predictions = neighbours.predict_split(setting.corpus.split("test"), top_k=EVALUATED)
        end = time.perf_counter()
        row = Row(
            name="knn",
            title=f"kNN-{NEIGHBOURS}",
            metrics=models.evaluate(predictions),
            costs=_costs(setting, middle - start, end - middle, neighbours.n_bytes / 1e6),
        )
        return [row]

    return Task(
        name="knn",
        title="nearest neighbours",
        decided_by={"k": NEIGHBOURS, "eval": setting.config.to_dict()["eval"]},
        measure=measure,
    )


def _peer_task(
    models: Models,
    peer: Peer,
    method: str,
    kind: str,
    seed: int,
    features: Callable[[str], PointFeatures],
) -> Task:
    """Return the task that measures one method on one kind of features."""
    setting = models.setting
    title = f"{PEER_TITLES[method]}{{}}{FEATURES[kind]}"
    config = setting.config.to_dict()
    empty = Row(
        name=f"{method}/{kind}",
        title=title.format(""),
        seed=seed,
        settings={"peer": peer.package, "version": peer.version, "features": kind},
    )

    def measure() -> list[Row]:
        if peer.version is None:
            return [replace(empty, note=peer.missing)]
        inputs = features(kind)
        seeds = [PEER_SEEDS * seed + i for i in range(PEER_SEEDS)]
        try:
            results = run_peer(peer, method, inputs, setting, seeds)
        except PeerFailedError as failure:
            return [replace(empty, note=f"failed: {failure}")]
        return [
            replace(
                empty,
                name=f"{method}-{result.name}/{kind}" if result.name else empty.name,
                title=title.format(f" ×{result.name[1:]}" if result.name else ""),
                metrics=models.evaluate(result.predictions),
                costs=_costs(
                    setting,
                    inputs.train_seconds + result.train_seconds,
                    inputs.test_seconds + result.predict_seconds,
                    result.megabytes,
                ),
            )
            for result in results
        ]

    return Task(
        name=f"{method}-{kind}-seed{seed}",
        title=f"{title.format('')}, seed {seed}",
        decided_by={
            "peer": [peer.package, peer.version],
            "method": method,
            "features": [kind, config["rerank"]],
            "eval": config["eval"],
            "seed": seed,
        },
        measure=measure,
    )


def _costs(
    setting: Setting, train_seconds: float, predict_seconds: float, megabytes: float
) -> dict[str, float]:
    n_points = len(setting.corpus.split("test"))
    return {
        TRAIN_SECONDS: round(train_seconds, 3),
        MS_PER_POINT: round(1000 * predict_seconds / max(n_points, 1), 4),
        MEGABYTES: round(megabytes, 3),
    }
