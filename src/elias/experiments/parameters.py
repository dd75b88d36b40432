"""What can be swept: how each parameter is read, changed and kept within what makes sense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elias.errors import ConfigError, nearest

if TYPE_CHECKING:
    from elias.config import EliasConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Something to vary in a resolved configuration."""

    symbol: str
    factors: Sequence[float]
    """Default values, as multiples of the configuration's."""
    read: Callable[[EliasConfig], float]
    change: Callable[[EliasConfig, float], EliasConfig]
    limits: Callable[[EliasConfig, int], tuple[float, float]]
    """The lowest and the highest value, given the number of labels."""
    whole: bool = False
    """Whether it counts something."""
    trained: bool = True
    """Whether a value takes another model, or another search."""

    def defaults(self, config: EliasConfig, n_labels: int) -> list[float]:
        """Return values around that of the configuration, within the limits."""
        low, high = self.limits(config, n_labels)
        base = self.read(config) or 1.0
        scaled = (min(max(factor * base, low), high) for factor in self.factors)
        return sorted({float(round(v)) if self.whole else float(f"{v:.6g}") for v in scaled})

    def check(self, values: Sequence[float], config: EliasConfig, n_labels: int) -> list[float]:
        """Return the values in order, each once; refuse what cannot be."""
        low, high = self.limits(config, n_labels)
        for value in values:
            if not low <= value <= high:
                top = "" if high == math.inf else f" and at most {high:g}"
                raise ConfigError(
                    f"--values: {self.symbol} must be at least {low:g}{top} here, not {value:g}"
                )
            if self.whole and value != int(value):
                raise ConfigError(f"--values: {self.symbol} must be a whole number, not {value:g}")
        return sorted(set(values))


def parameter_called(name: str) -> Parameter:
    """Return the parameter of this name."""
    if name not in PARAMETERS:
        known = ", ".join(PARAMETERS)
        raise ConfigError(f"cannot sweep {name!r}{nearest(name, PARAMETERS)} (parameters: {known})")
    return PARAMETERS[name]


def _lambda(config: EliasConfig, value: float) -> EliasConfig:
    stages = tuple(replace(stage, shortlist_loss_weight=value) for stage in config.stages)
    return replace(config, stages=stages)


def _index(config: EliasConfig, **changes: Any) -> EliasConfig:
    return replace(config, index=replace(config.index, **changes))


def _kappa(config: EliasConfig, value: float) -> EliasConfig:
    """Change κ; a beam with fewer edges than the shortlist has places takes a shorter one."""
    index = config.index
    reached = (index.beam_size or 1) * int(value)
    shortlist = min(index.shortlist_size or reached, reached)
    training = min(index.train_shortlist or shortlist, reached)
    return _index(
        config, edges_per_cluster=int(value), shortlist_size=shortlist, train_shortlist=training
    )


def _budget(config: EliasConfig, n_labels: int) -> tuple[float, float]:
    """Return the limits of α and β."""
    del config, n_labels
    return 1.0, math.inf


PARAMETERS = {
    "lambda": Parameter(
        symbol="λ",
        factors=(0.0, 0.2, 0.5, 1.0, 2.0, 5.0),
        read=lambda config: config.stages[-1].shortlist_loss_weight,
        change=_lambda,
        limits=lambda _config, _n_labels: (0.0, math.inf),
    ),
    "kappa": Parameter(
        symbol="κ",
        factors=(0.1, 0.2, 0.5, 1.0, 2.0),
        read=lambda config: config.index.edges_per_cluster or 1,
        change=_kappa,
        # fewer than L/C would leave labels without an edge
        limits=lambda config, n: (math.ceil(n / (config.index.n_clusters or 1)), n),
        whole=True,
    ),
    "alpha": Parameter(
        symbol="α",
        factors=(0.1, 0.3, 1.0, 3.0, 10.0),
        read=lambda config: config.index.alpha,
        change=lambda config, value: _index(config, alpha=value),
        limits=_budget,
    ),
    "beta": Parameter(
        symbol="β",
        factors=(0.1, 0.3, 1.0, 3.0, 10.0),
        read=lambda config: config.index.beta or 1.0,
        change=lambda config, value: _index(config, beta=value),
        limits=_budget,
    ),
    "beam": Parameter(
        symbol="b",
        factors=(0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        read=lambda config: config.index.beam_size or 1,
        change=lambda config, value: _index(config, beam_size=int(value)),
        limits=lambda config, _n_labels: (1.0, config.index.n_clusters or 1),
        whole=True,
        trained=False,
    ),
    "shortlist": Parameter(
        symbol="K",
        factors=(0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        read=lambda config: config.index.shortlist_size or 1,
        change=lambda config, value: _index(config, shortlist_size=int(value)),
        limits=lambda _config, n: (1.0, n),
        whole=True,
        trained=False,
    ),
}
"""Table 7 has λ and κ; the others are what else the index is made of."""
