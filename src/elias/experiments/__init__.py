"""The paper's tables on any corpus: ablation, comparison, sweeps, pruning."""

from elias.experiments.ablation import ablation
from elias.experiments.compare import compare
from elias.experiments.prune import prune
from elias.experiments.runner import Plan, Result, Setting, carry_out
from elias.experiments.sweep import sweep

__all__ = ["Plan", "Result", "Setting", "ablation", "carry_out", "compare", "prune", "sweep"]
