"""Train and predict in several processes, each with a part of the points and the rows of W_L."""

from elias.distributed.world import SingleProcess, World, joined, launched_rank, process_counts

__all__ = ["SingleProcess", "World", "joined", "launched_rank", "process_counts"]
