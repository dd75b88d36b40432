"""Tables 7 and 9: vary one parameter and keep all others, and prune the edges of a trained model.

λ, κ, α and β are parameters of training, so each value trains a model. Beam and shortlist are
parameters of the search, so all values use one model. Edges are pruned by threshold and by rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from markupsafe import Markup

from elias.config import ResolvedConfig
from elias.config.resolve import check_sizes
from elias.data.corpus import resolve_config
from elias.errors import ConfigError, did_you_mean
from elias.experiments.runner import (
    MS_PER_POINT,
    REMOVED,
    TRAIN_SECONDS,
    Line,
    Plan,
    Row,
    Setting,
    Table,
    Task,
)
from elias.experiments.variants import MAIN_MODEL, METRICS, RUNS, Models, learns_graph, run_name
from elias.inference.edit_model import EdgeCount, prune_edges
from elias.inference.predictor import Elias
from elias.report.plots import Axis, Plot
from elias.rerank.reranker import CALIBRATE, NAMES, RERANK


@dataclass(frozen=True, slots=True)
class SweptParameter:
    """A parameter of a resolved configuration that can be varied."""

    symbol: str
    key: str
    """Field of the index configuration, or of the stage configurations for λ."""
    factors: Sequence[float]
    """Default values to try, as multiples of the configured value."""
    whole: bool = False
    """True if only whole numbers are allowed."""
    trained: bool = True
    """True for a training parameter, False for a search parameter."""

    def read(self, config: ResolvedConfig) -> float:
        """Return the value of the parameter in a configuration."""
        holder = config.stages[-1] if self.key == _LAMBDA else config.index
        return float(getattr(holder, self.key))

    def change(self, config: ResolvedConfig, value: float, n_labels: int) -> ResolvedConfig:
        """Return the configuration with another value of the parameter.

        Raises:
            ConfigError: If the value is not valid for a model with these sizes.
        """
        if self.key == _LAMBDA:
            stages = tuple(replace(stage, shortlist_loss_weight=value) for stage in config.stages)
            return replace(config, stages=stages)
        if self.whole and value % 1 != 0:
            raise ConfigError(f"{self.symbol} must be a whole number, not {value:g}")
        changes: dict[str, Any] = {self.key: int(value) if self.whole else value}
        index = replace(config.index, **changes)
        if self.key != _SHORTLIST:  # fewer clusters or edges may not reach enough labels
            reached = index.beam_size * index.edges_per_cluster
            index = replace(
                index,
                shortlist_size=min(index.shortlist_size, reached),
                train_shortlist=min(index.train_shortlist, reached),
            )
        check_sizes(index, n_labels)
        return replace(config, index=index)

    def defaults(self, config: ResolvedConfig, n_labels: int) -> list[float]:
        """Return the valid default values around the configured value."""
        base = self.read(config) or 1.0
        values = []
        for factor in self.factors:
            value = float(round(factor * base) if self.whole else f"{factor * base:.6g}")
            with suppress(ConfigError):
                self.change(config, value, n_labels)
                values.append(value)
        return values


def find_parameter(name: str) -> SweptParameter:
    """Return the parameter with the given name.

    Raises:
        ConfigError: If the name is unknown. The message lists all names.
    """
    if name not in PARAMETERS:
        known = ", ".join(PARAMETERS)
        raise ConfigError(
            f"cannot sweep {name!r}{did_you_mean(name, PARAMETERS)} (use one of: {known})"
        )
    return PARAMETERS[name]


_LAMBDA, _SHORTLIST = "shortlist_loss_weight", "shortlist_size"
_AROUND = (0.1, 0.3, 1.0, 3.0, 10.0)
_BEAMS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
PARAMETERS = {
    "lambda": SweptParameter("λ", _LAMBDA, (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)),
    "kappa": SweptParameter("κ", "edges_per_cluster", (0.1, 0.2, 0.5, 1.0, 2.0), whole=True),
    "alpha": SweptParameter("α", "alpha", _AROUND),
    "beta": SweptParameter("β", "beta", _AROUND),
    "beam": SweptParameter("b", "beam_size", _BEAMS, whole=True, trained=False),
    "shortlist": SweptParameter("K", _SHORTLIST, _BEAMS[1:], whole=True, trained=False),
}
"""Parameters by name. Table 7 varies λ and κ only."""

SHOWN = ("P@1", "P@5", "R@10", "R@100")


def sweep(
    setting: Setting,
    parameter: str,
    *,
    values: Sequence[float] | None = None,
    component: str | None = None,
) -> Plan:
    """Plan the sweep of a parameter.

    Args:
        setting: Configuration, corpus, seeds and folder. Only the first member of an ensemble is
            used.
        parameter: ``lambda``, ``kappa``, ``alpha``, ``beta``, ``beam`` or ``shortlist``.
        values: Values to try; by default several around the configured value.
        component: The component to measure; by default the last stage.
    """
    if setting.config.index.kind == "all":
        raise ConfigError("one-vs-all has no index to sweep; set index.kind to 'graph'")
    swept, n_labels = find_parameter(parameter), setting.corpus.n_labels
    chosen = sorted(set(swept.defaults(setting.config, n_labels) if values is None else values))
    for value in chosen:
        try:
            swept.change(setting.config, value, n_labels)
        except ConfigError as error:
            raise ConfigError(f"--values {value:g}: {error}") from None
    models = Models(setting)
    measured = models.component(component)

    def run_of(value: float, seed: int) -> tuple[str, ResolvedConfig]:
        """Return the name and the configuration of the run for a value of the parameter."""
        base = setting.seeded(seed)
        if swept.trained:
            config = resolve_config(swept.change(base, value, n_labels), setting.corpus)
            if config != base:
                # Do not train a ranker that is not measured.
                if measured not in (RERANK, CALIBRATE, NAMES):
                    config = replace(config, rerank=replace(config.rerank, enabled=False))
                return run_name(f"{parameter}-{value:.12g}", seed), config
        return run_name(MAIN_MODEL, seed), base

    def measure(value: float, seed: int) -> list[Row]:
        trained = models.get(*run_of(value, seed))
        row = Row(
            name=f"{parameter}={value:.12g}",
            title=f"{value:g}",
            seed=seed,
            costs={TRAIN_SECONDS: round(trained.train_seconds(measured), 3)},
            settings={parameter: value},
            run=trained.run,
        )
        if swept.trained:  # training has recorded the metrics
            recorded = trained.model.metadata["metrics"][measured]["test"]
            costs = {**row.costs, MS_PER_POINT: models.ms_per_point([trained.model], measured)}
            return [replace(row, metrics=recorded, costs=costs)]
        model = copy(trained.model)
        model.config = swept.change(model.config, value, n_labels)
        return [models.measure(row, model, measured)]

    tasks = []
    for seed in setting.seeds:
        for value in chosen:
            name, config = run_of(value, seed)
            models.check(name, config)
            task = f"{parameter}={value:.12g}-{measured}-seed{seed}"
            title = f"{swept.symbol} = {value:g}, seed {seed}"
            tasks.append(Task(task, title, partial(measure, value, seed)))
    costs = (TRAIN_SECONDS, MS_PER_POINT) if swept.trained else (MS_PER_POINT,)
    base = swept.read(setting.config)
    return Plan(
        name=f"sweep-{parameter}",
        title=f"Metrics by {swept.symbol} (Table 7)",
        setting=setting,
        tasks=tasks,
        table=Table(swept.symbol, columns=(*METRICS, *costs), shown=(*SHOWN, *costs)),
        plot=lambda lines: _plot(lines, parameter, swept.symbol, base),
        options={"values": chosen, "component": measured},
        remarks=[f"Measured: {measured}."],
    )


def _plot(lines: Sequence[Line], parameter: str, symbol: str, base: float) -> Markup:
    """Plot the change of each metric relative to the line nearest to the configured value."""
    shown = [line for line in lines if line.mean]
    values = np.array([float(line.settings[parameter]) for line in shown])
    at = int(np.argmin(np.abs(values - base)))
    means = {key: np.array([line.mean[key] for line in shown]) for key in SHOWN}
    best = ", ".join(f"{key} at {values[int(np.argmax(mean))]:g}" for key, mean in means.items())
    is_wide = bool(values.min() > 0 and values.max() > 20 * values.min())
    axes = Axis(symbol, log=is_wide), Axis(f"difference to {symbol} = {values[at]:g}, points")
    plot = Plot(f"Metrics by {symbol}", *axes)
    for key, mean in means.items():
        change = mean - mean[at]
        std = np.array([line.std.get(key, 0.0) for line in shown])
        plot.line(key, values, change, band=(change - std, change + std) if std.any() else ())
    return plot.svg(f"Highest: {best}.")


THRESHOLD, TOP_K = "threshold", "top_k"
RULES = {THRESHOLD: "by threshold", TOP_K: "by rank"}
THRESHOLDS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Edge score thresholds of Table 9a."""
SHARES = (0.75, 0.5, 0.3, 0.2, 0.1, 0.05)
"""Fractions of the κ edges of a cluster to keep, as in Table 9b."""
PRUNE_SHOWN = (REMOVED, "P@1", "P@5", "R@10", "R@100", MS_PER_POINT)


@dataclass(frozen=True, slots=True)
class PruneRule:
    """A rule that selects the edges to keep."""

    by: str
    """Kind of the rule, a key of `RULES`."""
    limit: float
    """Minimum edge score, or maximum number of edges per cluster."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the limit is not allowed."""
        if self.by == THRESHOLD and not 0 <= self.limit <= 1:
            raise ConfigError(
                f"a threshold must be in [0, 1], the range of edge scores, not {self.limit:g}"
            )
        if self.by == TOP_K and (self.limit < 1 or self.limit != int(self.limit)):
            raise ConfigError(
                f"the edges to keep per cluster must be a whole number >= 1, not {self.limit:g}"
            )

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.by}={self.limit:.12g}"

    @property
    def title(self) -> str:
        """Return the title of the row."""
        if self.by == TOP_K:
            return f"the {self.limit:g} best of a cluster"
        return f"ŝ ≥ {self.limit:g}" if self.limit else "all"

    def apply(self, model: Elias) -> tuple[Elias, EdgeCount]:
        """Return a pruned model, and the numbers of edges before and after pruning."""
        if self.by == THRESHOLD:
            return prune_edges(model, threshold=self.limit)
        return prune_edges(model, top_k=int(self.limit))


ALL_EDGES = PruneRule(THRESHOLD, 0.0)


def prune(
    setting: Setting,
    *,
    model: Elias | None = None,
    thresholds: Sequence[float] | None = None,
    tops: Sequence[int] | None = None,
    component: str | None = None,
) -> Plan:
    """Plan the pruning of the edges of a model.

    Args:
        setting: Configuration (of ``model``, if given), corpus, seeds and folder.
        model: A trained model to prune. If None, one model is trained for each seed.
        thresholds: Minimum edge scores to keep; by default the thresholds of the paper.
        tops: Numbers of edges to keep per cluster; by default the fractions of κ in the paper.
        component: The component to measure; by default the last stage.
    """
    if not learns_graph(setting.config):
        raise ConfigError(
            "no stage learns a graph, so there are no edges to prune; set learn_graph in a stage"
        )
    if tops is None:
        kappa = setting.config.index.edges_per_cluster
        tops = [max(1, round(share * kappa)) for share in SHARES]
    thresholds = sorted(THRESHOLDS if thresholds is None else thresholds)
    rules = [ALL_EDGES, *(PruneRule(THRESHOLD, float(limit)) for limit in thresholds)]
    rules += [PruneRule(TOP_K, float(limit)) for limit in sorted(tops, reverse=True)]
    rules = list(dict.fromkeys(rules))
    models = Models(setting)
    if model is not None:
        measured = model.check_component(component or setting.config.stages[-1].name)
    else:
        measured = models.component(component)
        for seed in setting.seeds:
            models.check(run_name(MAIN_MODEL, seed), setting.seeded(seed))

    def measure(rule: PruneRule, seed: int) -> list[Row]:
        pruned, edges = rule.apply(model or _trained(models, seed))
        row = Row(
            name=rule.name,
            title=rule.title,
            seed=seed,
            costs={
                REMOVED: round(100 * edges.removed, 4),
                "edges": edges.after,
                "edges_for_labels": edges.for_labels,
            },
            settings={"by": rule.by, "limit": rule.limit},
            run=f"{RUNS}/{run_name(MAIN_MODEL, seed)}" if model is None else None,
        )
        return [models.measure(row, pruned, measured)]

    tasks = []
    for seed, rule in product(setting.seeds, rules):
        task = f"{rule.name}-{measured}-seed{seed}"
        if model is not None:  # another model may have the same configuration
            task += f"-{crc32(json.dumps(model.metadata, sort_keys=True).encode()):08x}"
        title = f"edges kept: {rule.title}, seed {seed}"
        tasks.append(Task(task, title, partial(measure, rule, seed)))
    return Plan(
        name="prune",
        title="Pruned edges (Table 9)",
        setting=setting,
        tasks=tasks,
        table=Table("edges kept", columns=(REMOVED, *METRICS, MS_PER_POINT), shown=PRUNE_SHOWN),
        plot=_plot_pruning,
        options={"cuts": [rule.name for rule in rules], "component": measured},
        remarks=[
            f"Measured: {measured}. The scores of the edges that stay are unchanged, and every "
            "label keeps its strongest edge."
        ],
    )


def _trained(models: Models, seed: int) -> Elias:
    return models.get(run_name(MAIN_MODEL, seed), models.setting.seeded(seed)).model


def _plot_pruning(lines: Sequence[Line]) -> Markup:
    """Plot the change of metrics against the share of edges removed."""
    shown = [line for line in lines if line.mean]
    full = next((line for line in shown if line.name == ALL_EDGES.name), shown[0])
    most = max(line.mean[REMOVED] for line in shown)
    axes = Axis("% of edges removed", 0.0, 100.0), Axis("difference to all edges, points")
    plot = Plot("Metrics by share of edges removed (Table 9)", *axes)
    for kind, title in RULES.items():
        pruned = [line for line in shown if line.settings["by"] == kind or line is full]
        pruned.sort(key=lambda line: line.mean[REMOVED])
        removed = [line.mean[REMOVED] for line in pruned]
        for key in ("P@1", "R@100"):
            change = [line.mean[key] - full.mean[key] for line in pruned]
            plot.line(f"{key}, {title}", removed, change)
    return plot.svg(f"Up to {most:.1f}% of the edges are removed.")


def save_pruned(
    setting: Setting, rule: PruneRule, folder: Path, *, model: Elias | None = None
) -> EdgeCount:
    """Prune a model and save it with its test metrics.

    Without ``model``, prune the model of the first seed.

    Raises:
        ModelError: If the folder exists, or cannot be written.
    """
    models = Models(setting)
    pruned, edges = rule.apply(model or _trained(models, setting.seeds[0]))
    predictions = pruned.predict_components(setting.corpus.split("test"))
    pruned.metadata["metrics"] = {
        component: {"test": models.evaluate(one)} for component, one in predictions.items()
    }
    pruned.save_pretrained(folder, overwrite=setting.overwrite)
    return edges
