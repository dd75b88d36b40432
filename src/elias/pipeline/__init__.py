"""The whole: train everything, save and load it, predict with it."""

from elias.pipeline.explaining import ExplainedLabel, Explanation, LabelPath
from elias.pipeline.fitting import train, train_together
from elias.pipeline.predictor import Elias
from elias.pipeline.pruning import EdgeCount, prune_edges
from elias.pipeline.resources import pick_device
from elias.pipeline.volume import FileDone, FileTask, predict_file

__all__ = [
    "EdgeCount",
    "Elias",
    "ExplainedLabel",
    "Explanation",
    "FileDone",
    "FileTask",
    "LabelPath",
    "pick_device",
    "predict_file",
    "prune_edges",
    "train",
    "train_together",
]
