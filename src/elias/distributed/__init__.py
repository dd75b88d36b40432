"""Several processes that train one model: points are shared out, and so are the rows of W_L."""

from elias.distributed.launch import join, joined, launched, n_launched, staying
from elias.distributed.world import World

__all__ = ["World", "join", "joined", "launched", "n_launched", "staying"]
