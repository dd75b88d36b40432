"""Options that the experiments share, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elias.cli import talk
from elias.cli.options import read_corpus, reread_corpus
from elias.cli.train import chosen_config, show_plan

if TYPE_CHECKING:
    from elias.data import Corpus
    from elias.experiments import Setting
    from elias.experiments.prune import Cut
    from elias.pipeline import Elias

Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Where results go; models go below DIR/runs."),
]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Start from a preset; see elias presets.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file, or a config.json.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may repeat."),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="S,S,…", help="Seeds to average over. (default: that of the configuration)"
    ),
]
Component = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What to measure, e.g. rerank. (default: the last stage)"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the corpus is read."""

    text: str | None
    labels: str | None
    separator: str | None
    test_size: float | None

    def corpus(self, data: Path) -> Corpus:
        """Read it."""
        return read_corpus(data, self.text, self.labels, self.separator, test_size=self.test_size)

    def corpus_of(self, model: Elias, data: Path) -> Corpus:
        """Read it as the model's training read it, with the same test points."""
        from elias.data.loading import DEFAULT_TEST_SHARE, set_test_aside
        from elias.pipeline.matching import as_trained

        given = {"text": self.text, "labels": self.labels, "separator": self.separator}
        corpus = reread_corpus(data, model, given, test_size=self.test_size or 0)
        if self.test_size is not None or list(corpus.splits) != ["train"]:
            return corpus
        cut = as_trained(corpus, model.label_names, model.facts)
        return cut or set_test_aside(corpus, DEFAULT_TEST_SHARE, seed=0)


@dataclass(frozen=True, slots=True)
class Given:
    """What to train on what, and where results go."""

    data: Path
    out: Path
    preset: str | None
    config: Path | None
    changes: list[str]
    seeds: str | None
    device: str
    overwrite: bool

    def setting(self, reading: Reading) -> Setting:
        """Check the options, read the corpus, and tell what is going to be trained."""
        chosen = chosen_config(self.preset, self.config, self.changes)
        seeds = None if self.seeds is None else whole_numbers("--seeds", self.seeds)

        from elias.experiments import Setting
        from elias.pipeline import pick_device
        from elias.pipeline.fitting import check_plan

        # what is wrong is better refused before a large corpus is read
        check_plan(chosen, None)
        pick_device(self.device)
        corpus = reading.corpus(self.data)
        setting = Setting.of(chosen, corpus, self.out, seeds=seeds, **self._place())
        show_plan(setting.config, corpus)
        return setting

    def setting_of(self, model: Path, reading: Reading) -> tuple[Elias, Setting]:
        """Read a trained model and its corpus."""
        from elias.errors import ConfigError, DataError
        from elias.experiments import Setting
        from elias.pipeline import Elias

        named = {
            "--preset": self.preset,
            "--config": self.config,
            "--set": self.changes,
            "--seeds": self.seeds,
        }
        useless = [name for name, value in named.items() if value]
        if useless:
            raise ConfigError(f"{useless[0]} trains a model, and --model gives one; leave one out")
        trained = Elias.from_pretrained(model, device=self.device)
        corpus = reading.corpus_of(trained, self.data)
        if list(corpus.label_names) != list(trained.label_names):
            raise DataError(f"{self.data}: its labels are not those of {model}; give its corpus")
        setting = Setting.of(trained.config, corpus, self.out, **self._place())
        if trained.facts.get("data", {}).get("splits") != setting.data["splits"]:
            talk.warn(f"{model} was trained on other points; these may be among them")
        return trained, setting

    def _place(self) -> dict[str, Any]:
        return {"device": self.device, "overwrite": self.overwrite}


def numbers(option: str, text: str) -> list[float]:
    """Read numbers separated by commas."""
    from elias.errors import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: write numbers with commas between them") from None


def whole_numbers(option: str, text: str) -> list[int]:
    """Read whole numbers separated by commas."""
    from elias.errors import ConfigError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: write whole numbers with commas between them, e.g. 0,1,2"
        ) from None


def kept_edges(save: Path | None, keep: str | None, *, overwrite: bool) -> Cut | None:
    """Read which edges the saved model keeps; refuse a folder that is taken before any work."""
    from elias.errors import ConfigError
    from elias.experiments.prune import THRESHOLD, TOP_K, Cut

    if save is None and keep is None:
        return None
    if save is None or keep is None:
        raise ConfigError("--save FOLDER and --keep RULE go together, e.g. --keep threshold=0.25")
    if save.exists() and not overwrite and (not save.is_dir() or any(save.iterdir())):
        raise ConfigError(f"--save {save}: already exists; use --overwrite or another folder")
    by, _, limit = keep.partition("=")
    ways = {"threshold": THRESHOLD, "top": TOP_K}
    try:
        return Cut(ways[by], float(limit))
    except (KeyError, ValueError):
        raise ConfigError(
            f"--keep {keep!r}: write threshold=0.25, or top=100 for so many of each cluster"
        ) from None
