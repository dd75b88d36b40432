"""Performance-critical operations: search, scores, losses and updates, on a CPU or a GPU."""

from elias.kernels.gradients import IndexGradients
from elias.kernels.ops import (
    Expansion,
    adamw_edges,
    adamw_pairs,
    adamw_rows,
    bag_sum,
    edge_log,
    expand_beam,
    label_logits,
    label_loss,
    log_probabilities,
    path_log,
    shortlist_bce,
)

__all__ = [
    "Expansion",
    "IndexGradients",
    "adamw_edges",
    "adamw_pairs",
    "adamw_rows",
    "bag_sum",
    "edge_log",
    "expand_beam",
    "label_logits",
    "label_loss",
    "log_probabilities",
    "path_log",
    "shortlist_bce",
]
