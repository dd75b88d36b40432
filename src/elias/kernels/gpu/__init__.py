"""GPU kernels in Triton; `elias.kernels` dispatches to them."""

from elias.kernels.gpu.adamw import adamw_edges as adamw_edges
from elias.kernels.gpu.adamw import adamw_pairs as adamw_pairs
from elias.kernels.gpu.attention import packed_attention as packed_attention
from elias.kernels.gpu.loss import shortlist_bce as shortlist_bce
from elias.kernels.gpu.paths import edge_log as edge_log
from elias.kernels.gpu.paths import path_log as path_log
from elias.kernels.gpu.rows import label_logits as label_logits
from elias.kernels.gpu.rows import pair_rows as pair_rows
from elias.kernels.gpu.search import expand_beam as expand_beam
from elias.kernels.plain import adamw_dense as adamw_dense
from elias.kernels.plain import bag_sum as bag_sum
from elias.kernels.plain import every_label_bce as every_label_bce
from elias.kernels.plain import log_probabilities as log_probabilities
