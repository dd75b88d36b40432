"""Deprecated module, which will be removed in version 0.3. Import its names from ``elias``."""

import elias

__getattr__ = elias._moved(
    __name__,
    *("Elias", "EdgeCount", "FileDone", "FileTask", "OnnxModel"),
    *("predict_file", "prune_edges", "train", "train_together"),
)
