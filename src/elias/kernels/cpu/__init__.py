"""CPU kernels compiled by numba; `elias.kernels.ops` dispatches to them."""

from elias.kernels.cpu.adamw import adamw_rows
from elias.kernels.cpu.loss import shortlist_bce
from elias.kernels.cpu.paths import path_log
from elias.kernels.cpu.rank import log_probabilities
from elias.kernels.cpu.rows import bag_sum, label_logits
from elias.kernels.cpu.search import expand_beam

__all__ = [
    "adamw_rows",
    "bag_sum",
    "expand_beam",
    "label_logits",
    "log_probabilities",
    "path_log",
    "shortlist_bce",
]
