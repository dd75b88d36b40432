"""CPU kernels compiled by numba; `elias.kernels` dispatches to them."""

from elias.kernels.cpu.adamw import adamw_dense as adamw_dense
from elias.kernels.cpu.adamw import adamw_rows as adamw_rows
from elias.kernels.cpu.loss import every_label_bce as every_label_bce
from elias.kernels.cpu.loss import shortlist_bce as shortlist_bce
from elias.kernels.cpu.matmul import product as product
from elias.kernels.cpu.paths import path_log as path_log
from elias.kernels.cpu.rows import bag_sum as bag_sum
from elias.kernels.cpu.rows import embed_bags as embed_bags
from elias.kernels.cpu.rows import label_logits as label_logits
from elias.kernels.cpu.search import expand_beam as expand_beam
from elias.kernels.cpu.search import find_beams as find_beams
from elias.kernels.cpu.search import log_probabilities as log_probabilities
from elias.kernels.cpu.search import rank_rows as rank_rows
