"""CPU kernels compiled by numba; `elias.kernels` dispatches to them."""

from elias.kernels.cpu.adamw import adamw_rows
from elias.kernels.cpu.loss import shortlist_bce
from elias.kernels.cpu.paths import path_log
from elias.kernels.cpu.rows import bag_sum, label_logits
from elias.kernels.cpu.search import expand_beam, log_probabilities, rank_beams

__all__ = [
    "adamw_rows",
    "bag_sum",
    "expand_beam",
    "label_logits",
    "log_probabilities",
    "path_log",
    "rank_beams",
    "shortlist_bce",
]
