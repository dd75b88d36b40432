"""Table 9: prune the edges of a trained model by threshold and by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elias.config import model_settings
from elias.errors import ConfigError
from elias.experiments.models import MAIN_MODEL, METRICS, RUNS, Models, learns_graph, run_name
from elias.experiments.runner import MS_PER_POINT, REMOVED, Line, Plan, Row, Table, Task
from elias.inference.predictor import Elias
from elias.inference.prune import EdgeCount, prune_edges
from elias.report.plots import Axis, Plot

if TYPE_CHECKING:
    from markupsafe import Markup

    from elias.experiments.runner import Setting


THRESHOLD, TOP_K = "threshold", "top_k"
RULES = {THRESHOLD: "by threshold", TOP_K: "by rank"}
THRESHOLDS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Edge score thresholds of Table 9a."""
SHARES = (0.75, 0.5, 0.3, 0.2, 0.1, 0.05)
"""Fractions of the κ edges of a cluster to keep, as in Table 9b."""
SHOWN = (REMOVED, "P@1", "P@5", "R@10", "R@100", MS_PER_POINT)


@dataclass(frozen=True, slots=True)
class PruneRule:
    """A rule that selects the edges to keep."""

    by: str
    """A key of `RULES`."""
    limit: float
    """Minimum edge score, or maximum number of edges per cluster."""

    def __post_init__(self) -> None:
        """Check the limit."""
        if self.by == THRESHOLD and not 0 <= self.limit <= 1:
            raise ConfigError(
                f"a threshold must be in [0, 1], as edge scores are, not {self.limit:g}"
            )
        if self.by == TOP_K and (self.limit < 1 or self.limit != int(self.limit)):
            raise ConfigError(
                f"the edges kept per cluster must be a whole number >= 1, not {self.limit:g}"
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
        """Prune a model and return it with its edge counts."""
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
        setting: Configuration (that of ``model`` if given), corpus, seeds and folder.
        model: A trained model to prune. If None, one model is trained for each seed.
        thresholds: Lowest edge scores to keep; by default those of the paper.
        tops: Numbers of edges to keep per cluster; by default the fractions of κ in the paper.
        component: The component to measure; by default the last stage.
    """
    if not learns_graph(setting.config):
        raise ConfigError("no stage learns a graph, so there are no edges to prune")
    if tops is None:
        kappa = setting.config.index.edges_per_cluster
        tops = [max(1, round(share * kappa)) for share in SHARES]
    thresholds = sorted(THRESHOLDS if thresholds is None else thresholds)
    cuts = [ALL_EDGES, *(PruneRule(THRESHOLD, float(limit)) for limit in thresholds)]
    cuts += [PruneRule(TOP_K, float(limit)) for limit in sorted(tops, reverse=True)]
    cuts = list(dict.fromkeys(cuts))
    models = Models(setting)
    if model is not None:
        measured = model.check_component(component or setting.config.stages[-1].name)
    else:
        measured = models.component(component)
        for seed in setting.seeds:
            models.check(run_name(MAIN_MODEL, seed), setting.seeded(seed))

    def measure(cut: PruneRule, seed: int) -> list[Row]:
        pruned, edges = cut.apply(model or _trained(models, seed))
        row = Row(
            name=cut.name,
            title=cut.title,
            seed=seed,
            costs={
                REMOVED: round(100 * edges.removed, 4),
                "edges": edges.after,
                "edges_for_labels": edges.for_labels,
            },
            settings={"by": cut.by, "limit": cut.limit},
            run=f"{RUNS}/{run_name(MAIN_MODEL, seed)}" if model is None else None,
        )
        return [models.measure(row, pruned, measured)]

    tasks = [
        Task(
            name=f"{cut.name}-seed{seed}",
            title=f"edges kept: {cut.title}, seed {seed}",
            decided_by={
                "config": model_settings(setting.seeded(seed).to_dict()),
                "model": None if model is None else model.metadata,
                "cut": cut.name,
                "component": measured,
            },
            measure=partial(measure, cut, seed),
        )
        for seed in setting.seeds
        for cut in cuts
    ]
    return Plan(
        name="prune",
        title="Pruned edges (Table 9)",
        setting=setting,
        tasks=tasks,
        table=Table("edges kept", columns=(REMOVED, *METRICS, MS_PER_POINT), shown=SHOWN),
        plot=_plot,
        options={"cuts": [cut.name for cut in cuts], "component": measured},
        remarks=[
            f"Measured: {measured}. The scores of the edges that stay are unchanged, and every "
            "label keeps its strongest edge."
        ],
    )


def _trained(models: Models, seed: int) -> Elias:
    return models.get(run_name(MAIN_MODEL, seed), models.setting.seeded(seed)).model


def _plot(lines: Sequence[Line]) -> Markup:
    """Plot the change of metrics against the share of edges removed."""
    shown = [line for line in lines if line.mean]
    full = next((line for line in shown if line.name == ALL_EDGES.name), shown[0])
    most = max(line.mean[REMOVED] for line in shown)
    axes = Axis("% of edges removed", 0.0, 100.0), Axis("difference to all edges, points")
    plot = Plot("Metrics by share of edges removed (Table 9)", *axes)
    for rule, title in RULES.items():
        cuts = [line for line in shown if line.settings["by"] == rule or line is full]
        cuts.sort(key=lambda line: line.mean[REMOVED])
        removed = [line.mean[REMOVED] for line in cuts]
        for key in ("P@1", "R@100"):
            change = [line.mean[key] - full.mean[key] for line in cuts]
            plot.line(f"{key}, {title}", removed, change)
    return plot.svg(f"Up to {most:.1f}% of the edges are removed.")


def save_pruned(
    setting: Setting, cut: PruneRule, folder: Path, *, model: Elias | None = None
) -> EdgeCount:
    """Prune a model and save it with its test metrics.

    Without ``model``, prune the model of the first seed.

    Raises:
        ModelError: If the folder exists, or cannot be written.
    """
    models = Models(setting)
    pruned, edges = cut.apply(model or _trained(models, setting.seeds[0]))
    predictions = pruned.predict_components(setting.corpus.split("test"))
    pruned.metadata["metrics"] = {
        component: {"test": models.evaluate(one)} for component, one in predictions.items()
    }
    pruned.save_pretrained(folder, overwrite=setting.overwrite)
    return edges
