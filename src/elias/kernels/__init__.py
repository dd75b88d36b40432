"""The hot operations: one interface each, a compiled CPU version and a plain torch one."""

from elias.kernels.adamw import adamw_rows
from elias.kernels.rows import bag_sum, label_logits
from elias.kernels.search import Expansion, expand_beam

__all__ = ["Expansion", "adamw_rows", "bag_sum", "expand_beam", "label_logits"]
