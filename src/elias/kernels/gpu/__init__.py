"""GPU kernels in Triton; `elias.kernels` dispatches to them."""

from elias.kernels.gpu.adamw import adamw_edges, adamw_pairs
from elias.kernels.gpu.loss import label_loss, shortlist_bce
from elias.kernels.gpu.paths import edge_log, path_log
from elias.kernels.gpu.rows import label_logits, pair_rows
from elias.kernels.gpu.search import expand_beam
from elias.kernels.plain import bag_sum, log_probabilities

__all__ = [
    "adamw_edges",
    "adamw_pairs",
    "bag_sum",
    "edge_log",
    "expand_beam",
    "label_logits",
    "label_loss",
    "log_probabilities",
    "pair_rows",
    "path_log",
    "shortlist_bce",
]
