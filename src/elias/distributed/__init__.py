"""Training and prediction in several processes: points and rows of W_L are split among them."""

from elias.distributed.launch import joined, launched_rank, process_counts
from elias.distributed.world import SingleProcess, World

__all__ = ["SingleProcess", "World", "joined", "launched_rank", "process_counts"]
