"""The configuration: a tree of frozen dataclasses, presets, overrides, and files.

Precedence: defaults < preset < ``--config FILE`` < ``--encoder`` < ``--set key=value``. Settings
that are None are derived from the data by `EliasConfig.resolve`; a run saves the resolved
configuration.
"""

from elias.config.io import (
    complete_tree,
    first_difference,
    model_settings,
    preset_names,
    preset_summary,
    read_tree,
    without_learning_rates,
)
from elias.config.resolve import (
    ResolvedConfig,
    ResolvedEncoder,
    ResolvedIndex,
    ResolvedStage,
    fill_sizes,
)
from elias.config.schema import (
    DEFAULT_STAGES,
    ONE_VS_ALL,
    CheckpointConfig,
    DataConfig,
    EliasConfig,
    EncoderConfig,
    EnsembleConfig,
    EvalConfig,
    IndexConfig,
    LossConfig,
    RerankConfig,
    StageConfig,
    TrackingConfig,
)

__all__ = [
    "DEFAULT_STAGES",
    "ONE_VS_ALL",
    "CheckpointConfig",
    "DataConfig",
    "EliasConfig",
    "EncoderConfig",
    "EnsembleConfig",
    "EvalConfig",
    "IndexConfig",
    "LossConfig",
    "RerankConfig",
    "ResolvedConfig",
    "ResolvedEncoder",
    "ResolvedIndex",
    "ResolvedStage",
    "StageConfig",
    "TrackingConfig",
    "complete_tree",
    "fill_sizes",
    "first_difference",
    "model_settings",
    "preset_names",
    "preset_summary",
    "read_tree",
    "without_learning_rates",
]
