"""The configuration: one frozen tree, its presets, overrides and strict (de)serialisation.

Precedence: defaults < preset < ``--config FILE`` < ``--set key=value``. A size left ``None`` is
derived from the data by `EliasConfig.resolve`, and the resolved tree is what a run writes down.
"""

from elias.config.io import (
    decisive,
    first_difference,
    merge,
    parse_override,
    preset_names,
    preset_summary,
    preset_tree,
    read_tree,
    without_rates,
)
from elias.config.resolve import ResolvedConfig, ResolvedEncoder, ResolvedIndex, fill_sizes
from elias.config.schema import (
    DEFAULT_STAGES,
    ONE_VS_ALL_STAGES,
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
    "ONE_VS_ALL_STAGES",
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
    "StageConfig",
    "TrackingConfig",
    "decisive",
    "fill_sizes",
    "first_difference",
    "merge",
    "parse_override",
    "preset_names",
    "preset_summary",
    "preset_tree",
    "read_tree",
    "without_rates",
]
