"""The hot operations: one interface each, a compiled CPU version and a plain torch one."""

from elias.kernels.rows import bag_sum, label_logits
from elias.kernels.search import Expansion, expand_beam
from elias.kernels.update import adamw_rows

__all__ = ["Expansion", "adamw_rows", "bag_sum", "expand_beam", "label_logits"]
