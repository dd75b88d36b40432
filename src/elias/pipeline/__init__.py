"""The whole: train everything, save and load it, predict with it."""

from elias.pipeline.explaining import ExplainedLabel, Explanation, LabelPath
from elias.pipeline.fitting import train
from elias.pipeline.predictor import Elias
from elias.pipeline.pruning import EdgeCount, prune_edges
from elias.pipeline.resources import pick_device

__all__ = [
    "EdgeCount",
    "Elias",
    "ExplainedLabel",
    "Explanation",
    "LabelPath",
    "pick_device",
    "prune_edges",
    "train",
]
