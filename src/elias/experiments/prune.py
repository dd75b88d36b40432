"""Table 9: edges of a trained model pruned by threshold and by rank, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from elias.config import decisive
from elias.errors import ConfigError
from elias.experiments.models import OURS, Models, judged, model_ms, run_name, single_component
from elias.experiments.plots import losses
from elias.experiments.runner import Plan, Task
from elias.experiments.tables import MS_PER_POINT, REMOVED, Row, Table
from elias.experiments.variants import learns_graph
from elias.inference.predictor import Elias
from elias.inference.prune import EdgeCount, prune_edges

if TYPE_CHECKING:
    from elias.experiments.runner import Setting


THRESHOLD, TOP_K = "threshold", "top_k"
WAYS = {THRESHOLD: "by threshold", TOP_K: "by rank"}
THRESHOLDS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Those of Table 9a."""
SHARES = (0.75, 0.5, 0.3, 0.2, 0.1, 0.05)
"""Edges of a cluster to keep, as shares of κ: those of Table 9b."""
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "R@10", "R@20", "R@100")
SHOWN = (REMOVED, "P@1", "P@5", "R@10", "R@100", MS_PER_POINT)


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to prune: one of `WAYS`, and its limit."""

    by: str
    limit: float

    def __post_init__(self) -> None:
        """Check the limit."""
        if self.by == THRESHOLD and not 0 <= self.limit <= 1:
            raise ConfigError(
                f"a threshold must be in [0, 1], as edge scores are, not {self.limit:g}"
            )
        if self.by == TOP_K and (self.limit < 1 or self.limit != int(self.limit)):
            raise ConfigError(
                f"the edges kept of a cluster must be a whole number >= 1, not {self.limit:g}"
            )

    @property
    def name(self) -> str:
        """Return what the row is called."""
        return f"{self.by}={self.limit:.12g}"

    @property
    def title(self) -> str:
        """Return what people read."""
        if self.by == TOP_K:
            return f"the {self.limit:g} best of a cluster"
        return f"ŝ ≥ {self.limit:g}" if self.limit else "all"

    def of(self, model: Elias) -> tuple[Elias, EdgeCount]:
        """Return the model so pruned, and how many edges that leaves."""
        if self.by == THRESHOLD:
            return prune_edges(model, threshold=self.limit)
        return prune_edges(model, top_k=int(self.limit))


WHOLE = Cut(THRESHOLD, 0.0)


def prune(
    setting: Setting,
    *,
    model: Elias | None = None,
    thresholds: Sequence[float] | None = None,
    tops: Sequence[int] | None = None,
    component: str | None = None,
) -> Plan:
    """Plan the pruning of a model's edges.

    Args:
        setting: What to train on what; with ``model``, the model's own configuration.
        model: A trained model to prune; without it, one is trained for each seed.
        thresholds: Lowest edge scores to keep; by default the paper's.
        tops: Edges of each cluster to keep; by default the paper's shares of κ.
        component: The part of the model that is measured; the last stage by default.
    """
    if not learns_graph(setting.config):
        raise ConfigError("no stage learns a graph, so there are no edges to prune")
    source = _Source(setting, Models(setting), model)
    cuts = _cuts(thresholds, tops, setting.config.index.edges_per_cluster)
    part = single_component(setting, component) if model is None else component
    if model is not None:
        part = model.check_component(component or setting.config.stages[-1].name)
    assert part is not None
    return Plan(
        name="prune",
        title="Edges pruned (Table 9)",
        setting=setting,
        tasks=[source.task(seed, cut, part) for seed in setting.seeds for cut in cuts],
        table=Table(heading="edges kept", columns=(REMOVED, *METRICS, MS_PER_POINT), shown=SHOWN),
        plot=lambda lines: losses(lines, WAYS, WHOLE.name, ("P@1", "R@100")),
        options={"cuts": [cut.name for cut in cuts], "component": part},
        remarks=[
            f"Measured: {part}. Edges that stay score what they scored, and every label keeps its "
            "strongest edge."
        ],
    )


def _cuts(thresholds: Sequence[float] | None, tops: Sequence[int] | None, kappa: int) -> list[Cut]:
    if thresholds is None:
        thresholds = THRESHOLDS
    if tops is None:
        tops = [max(1, round(share * kappa)) for share in SHARES]
    by_threshold = [Cut(THRESHOLD, float(limit)) for limit in sorted(thresholds)]
    by_rank = [Cut(TOP_K, float(limit)) for limit in sorted(tops, reverse=True)]
    return list(dict.fromkeys([WHOLE, *by_threshold, *by_rank]))


class _Source:
    """Where the models to prune come from."""

    def __init__(self, setting: Setting, models: Models, given: Elias | None) -> None:
        self.setting, self.models, self.given = setting, models, given
        if given is None:
            for seed in setting.seeds:
                models.check({run_name(OURS, seed): setting.seeded(seed)})
        # one at a time: each task asks for it again
        self.model: Callable[[int], Elias] = lru_cache(maxsize=1)(self._model)

    def _model(self, seed: int) -> Elias:
        if self.given is not None:
            return self.given
        return self.models.get(run_name(OURS, seed), self.setting.seeded(seed)).model

    def task(self, seed: int, cut: Cut, component: str) -> Task:
        """Return the task of one way to prune."""
        metadata = None if self.given is None else self.given.metadata
        return Task(
            name=f"{cut.name}-seed{seed}",
            title=f"edges kept: {cut.title}, seed {seed}",
            decided_by={
                "config": decisive(self.setting.seeded(seed).to_dict()),
                "model": metadata,
                "cut": cut.name,
                "component": component,
            },
            measure=lambda: [self._row(seed, cut, component)],
        )

    def _row(self, seed: int, cut: Cut, component: str) -> Row:
        pruned, edges = cut.of(self.model(seed))
        found = pruned.predict_split(self.setting.corpus.split("test"), component=component)
        return Row(
            name=cut.name,
            title=cut.title,
            seed=seed,
            metrics=judged(found, self.setting),
            costs={
                REMOVED: round(100 * edges.removed, 4),
                "edges": edges.after,
                "edges_for_labels": edges.for_labels,
                MS_PER_POINT: model_ms(pruned, self.setting, component),
            },
            settings={"by": cut.by, "limit": cut.limit},
            run=None if self.given is not None else f"runs/{run_name(OURS, seed)}",
        )


def save_pruned(
    setting: Setting, cut: Cut, folder: Path, *, model: Elias | None = None
) -> EdgeCount:
    """Save a model so pruned, with its test metrics: the given one, or that of the first seed.

    Raises:
        ModelError: If the folder is taken, or cannot be written.
    """
    source = _Source(setting, Models(setting), model)
    pruned, edges = cut.of(source.model(setting.seeds[0]))
    test = setting.corpus.split("test")
    pruned.metadata["metrics"] = {
        component: {"test": judged(pruned.predict_split(test, component=component), setting)}
        for component in pruned.components
    }
    pruned.save_pretrained(folder, overwrite=setting.overwrite)
    return edges
