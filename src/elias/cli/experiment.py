"""``elias experiment``: reproduce the paper's tables on any corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from typer import Argument, Option

import elias
from elias.cli import console, options
from elias.cli.train import show_plan
from elias.errors import ConfigError, DataError

if TYPE_CHECKING:
    from elias.experiments import Plan, Setting
    from elias.experiments.sweep import PruneRule


Number = TypeVar("Number", int, float)

Component = Annotated[
    str | None,
    Option(metavar="NAME", help="Component to measure, e.g. rerank (default: the last stage)."),
]

app = typer.Typer(
    cls=options.Group,
    no_args_is_help=True,
    help="Run the paper's experiments on a corpus: ablation, comparison, sweeps, pruning.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Options that all experiments share."""

    out: Annotated[Path, Option(metavar="DIR", help="Results folder; models go to DIR/runs.")]
    seeds: Annotated[
        str | None,
        Option(metavar="S,S,…", help="Seeds to average over (default: the configured seed)."),
    ] = None
    training: options.TrainingOptions
    as_json: Annotated[bool, Option("--json", help="Print the results as JSON.")] = False

    def setting(self) -> Setting:
        """Check the options, read the corpus, print the configuration, and return the setting."""
        seeds = _parse_numbers("--seeds", self.seeds, int)

        from elias.experiments import Setting

        config, corpus = self.training.read()
        device, overwrite = self.training.device, self.training.overwrite
        setting = Setting.of(
            config, corpus, self.out, seeds=seeds, device=device, overwrite=overwrite
        )
        show_plan(config, setting.config, corpus)
        return setting

    def setting_of(self, path: Path) -> tuple[elias.Elias, Setting]:
        """Load the trained model at ``path``, and the corpus with the test points of the run."""
        from elias.data.splits import (
            DEFAULT_TEST_SHARE,
            hold_out_test,
            restore_splits,
            same_statistics,
        )
        from elias.experiments import Setting

        data, test_size = self.training.data, self.training.test_size
        configuration, device = self.training.configuration, self.training.device
        config_options = {
            "--preset": configuration.preset,
            "--config": configuration.config_file,
            "--encoder": configuration.encoder,
            "--set": configuration.changes,
            "--seeds": self.seeds,
        }
        if conflicts := [option for option, value in config_options.items() if value]:
            raise ConfigError(
                f"{conflicts[0]}: has no effect with a trained --model; leave out one of them"
            )
        model = elias.Elias.from_pretrained(path, device=device)
        corpus = self.training.reading.read_as_trained(
            data, model, test_size=test_size or 0, group=self.training.group
        )
        if test_size is None and list(corpus.splits) == ["train"]:
            restored = restore_splits(corpus, model.label_names, model.metadata)
            corpus = restored or hold_out_test(corpus, DEFAULT_TEST_SHARE, seed=0)
        if list(corpus.label_names) != list(model.label_names):
            raise DataError(
                f"{data}: the labels differ from those of {path}; give the training corpus of "
                "this model"
            )
        setting = Setting.of(
            model.config, corpus, self.out, device=device, overwrite=self.training.overwrite
        )
        recorded = model.metadata.get("data", {}).get("splits", {})
        if not same_statistics(setting.data["splits"], recorded):
            console.warn(
                f"{path} was trained on another corpus, which may include some of these test "
                "points, so the metrics may be too high"
            )
        return model, setting

    def run(self, plan: Plan) -> None:
        """Run an experiment, then print its table and the reasons for missing numbers."""
        from elias.experiments import run_experiment

        try:
            result = run_experiment(plan)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"finished parts are kept in {plan.setting.folder}; run the same command again "
                "to continue"
            ) from None
        if self.as_json:
            console.print_json(result.document)
        else:
            measured = [replace(line, note="") for line in result.lines if line.mean]
            shown = [key for key in plan.table.shown if any(key in line.mean for line in measured)]
            rows = plan.table.rows(measured, shown, between="±")
            notes = [f"{line.title}: {line.note}" for line in result.lines if line.note]
            console.print_out(console.columns(plan.table.header(shown), rows), *notes)
        console.note(f"written: {', '.join(str(path) for path in result.files)}")


@app.command(cls=options.Command)
@options.expand_groups
def ablation(
    *,
    members: Annotated[
        int | None, Option(metavar="N", help="Ensemble size; 1 for no ensemble (default: 3).")
    ] = None,
    one_vs_all: Annotated[
        bool, Option("--one-vs-all", help="Also train one-vs-all with the same encoder.")
    ] = False,
    experiment: Experiment,
) -> None:
    """Measure the gain of each component, the ensemble and the learned index (Tables 3 and 8)."""
    setting = experiment.setting()

    from elias.experiments import ablation as plan_ablation

    experiment.run(plan_ablation(setting, members=members, with_one_vs_all=one_vs_all))


@app.command(cls=options.Command)
@options.expand_groups
def compare(
    *,
    members: Annotated[
        int | None, Option(metavar="N", help="Ensemble size (default: the configured one).")
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        Option(
            metavar="PACKAGE=PATH",
            help="Python interpreter with omikuji or pecos, e.g. pecos=PATH; repeatable.",
        ),
    ] = None,
    ranker_features: Annotated[
        bool,
        Option("--ranker-features", help="Also train omikuji and PECOS on the ranker's features."),
    ] = False,
    experiment: Experiment,
) -> None:
    """Compare ELIAS with one-vs-all, nearest neighbours, omikuji and PECOS (Tables 1 and 2)."""
    from elias.experiments.compare import parse_interpreters

    interpreters = parse_interpreters(peer_python or [])
    setting = experiment.setting()

    from elias.experiments import compare as plan_comparison

    plan = plan_comparison(
        setting, members=members, interpreters=interpreters, ranker_features=ranker_features
    )
    experiment.run(plan)


@app.command(cls=options.Command)
@options.expand_groups
def sweep(
    *,
    parameter: Annotated[
        str, Argument(metavar="PARAMETER", help="lambda, kappa, alpha, beta, beam or shortlist.")
    ],
    values: Annotated[
        str | None,
        Option(metavar="V,V,…", help="Values to try (default: near the configured value)."),
    ] = None,
    component: Component = None,
    experiment: Experiment,
) -> None:
    """Measure a model for several values of one parameter (Table 7).

    A model is trained for each value, except for beam and shortlist, which need only one model.
    """
    from elias.experiments.sweep import find_parameter

    find_parameter(parameter)
    numbers = _parse_numbers("--values", values, float)
    setting = experiment.setting()

    from elias.experiments import sweep as plan_sweep

    experiment.run(plan_sweep(setting, parameter, values=numbers, component=component))


@app.command(cls=options.Command)
@options.expand_groups
def prune(
    *,
    model: Annotated[
        Path | None, Option(metavar="RUN", help="Run or saved model to prune (default: train one).")
    ] = None,
    thresholds: Annotated[
        str | None,
        Option(metavar="T,T,…", help="Minimum edge scores to keep (default: as in the paper)."),
    ] = None,
    tops: Annotated[
        str | None,
        Option(
            "--top-k", metavar="N,N,…", help="Edges to keep per cluster (default: fractions of κ)."
        ),
    ] = None,
    component: Component = None,
    save: Annotated[
        Path | None, Option(metavar="FOLDER", help="Save a pruned model; requires --keep.")
    ] = None,
    keep: Annotated[
        str | None,
        Option(metavar="RULE", help="Pruning rule for --save: threshold=0.25 or top=100."),
    ] = None,
    experiment: Experiment,
) -> None:
    """Prune the edges of a trained model by threshold and by rank (Table 9)."""
    rule = _parse_rule(save, keep, overwrite=experiment.training.overwrite)
    by_threshold = _parse_numbers("--thresholds", thresholds, float)
    by_rank = _parse_numbers("--top-k", tops, int)
    trained = None
    if model is None:
        setting = experiment.setting()
    else:
        trained, setting = experiment.setting_of(model)

    from elias.experiments import prune as plan_pruning
    from elias.experiments.sweep import save_pruned

    plan = plan_pruning(
        setting, model=trained, thresholds=by_threshold, tops=by_rank, component=component
    )
    experiment.run(plan)
    if save is not None and rule is not None:
        edges = save_pruned(setting, rule, save, model=trained)
        console.note(
            f"{save}: saved with {edges.after:,} of {edges.before:,} edges "
            f"({100 * edges.removed:.1f}% removed)"
        )


def _parse_numbers(
    option: str, text: str | None, kind: Callable[[str], Number]
) -> list[Number] | None:
    """Parse numbers separated by commas."""
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example = "numbers separated by commas"
        if kind is int:
            example = f"whole {example}, e.g. 0,1,2"
        raise ConfigError(f"{option} {text!r}: write {example}") from None


def _parse_rule(save: Path | None, keep: str | None, *, overwrite: bool) -> PruneRule | None:
    """Parse ``--save`` and ``--keep``, and check before training that the folder can be used.

    The folder must be new or empty, unless ``overwrite`` is set.
    """
    from elias.experiments.sweep import THRESHOLD, TOP_K, PruneRule

    if save is None and keep is None:
        return None
    if save is None or keep is None:
        raise ConfigError("--save requires --keep, and --keep requires --save; give both")
    if save.exists() and not overwrite and (not save.is_dir() or any(save.iterdir())):
        raise ConfigError(f"--save {save}: already exists; use --overwrite or another folder")
    kind, _, limit = keep.partition("=")
    try:
        return PruneRule({"threshold": THRESHOLD, "top": TOP_K}[kind], float(limit))
    except (KeyError, ValueError):
        raise ConfigError(
            f"--keep {keep!r}: write threshold=0.25, or top=100 to keep 100 edges per cluster"
        ) from None
