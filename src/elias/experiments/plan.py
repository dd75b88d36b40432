"""What an experiment is about to do: its tasks in order, and how its table and plot look."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elias.config import EliasConfig
from elias.data.stats import corpus_stats
from elias.errors import ConfigError, DataError

if TYPE_CHECKING:
    from elias.analysis.markup import Markup
    from elias.data.corpus import Corpus
    from elias.experiments.rows import Line, Row
    from elias.experiments.tables import Table


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every experiment starts from."""

    config: EliasConfig
    """Resolved by `of`."""
    corpus: Corpus
    """With test points: every number is measured on those."""
    folder: Path
    """Where results go, and below ``runs`` every model."""
    seeds: tuple[int, ...]
    device: str = "auto"
    overwrite: bool = False
    """Replace what was made with another configuration, or of other data."""

    @classmethod
    def of(
        cls,
        config: EliasConfig,
        corpus: Corpus,
        folder: str | Path,
        *,
        seeds: Sequence[int] | None = None,
        device: str = "auto",
        overwrite: bool = False,
    ) -> Setting:
        """Return a setting, sizes derived from the corpus; the configuration's seed by default.

        Raises:
            DataError: If the corpus has no test points.
            ConfigError: If a seed comes twice.
        """
        if corpus.test is None:
            raise DataError(
                f"{corpus.source or 'corpus'}: has no test points to measure on; "
                "set some aside with --test-size"
            )
        chosen = (config.seed,) if seeds is None else tuple(seeds)
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ConfigError(f"seeds must be different, and at least one, not {list(chosen)}")
        return cls(
            config=config.resolve(len(corpus.train), corpus.n_labels),
            corpus=corpus,
            folder=Path(folder),
            seeds=chosen,
            device=device,
            overwrite=overwrite,
        )

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return the corpus in numbers, as JSON gives them back, and its fingerprint."""
        stats: dict[str, Any] = json.loads(json.dumps(corpus_stats(self.corpus).to_dict()))
        return {**stats, "fingerprint": self.corpus.fingerprint()}

    def seeded(self, seed: int) -> EliasConfig:
        """Return the configuration of one model with a seed."""
        return replace(self.config, seed=seed).member(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of an experiment: what is done at once, and done again if it was interrupted."""

    name: str
    title: str
    decided_by: Mapping[str, Any]
    """Everything that its numbers depend on beside the corpus, as JSON takes it."""
    measure: Callable[[], list[Row]]

    def digest(self, data: Mapping[str, Any]) -> str:
        """Return a name for all that decides its numbers."""
        whole = json.dumps([self.decided_by, data], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An experiment before it is carried out."""

    name: str
    """What its files are called."""
    title: str
    setting: Setting
    tasks: Sequence[Task]
    table: Table
    plot: Callable[[Sequence[Line]], Markup]
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for beside the configuration."""
    remarks: Sequence[str] = ()
    """What a reader of the table has to know."""
