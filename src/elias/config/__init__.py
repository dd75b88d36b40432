"""The configuration: a tree of frozen dataclasses, presets, overrides, and files.

Later sources override earlier sources: defaults, preset, ``--config FILE``, ``--encoder`` and
``--set key=value``. `EliasConfig.resolve` derives settings that are None from the data. A run saves
the resolved configuration.
"""

from elias.config.io import complete_tree as complete_tree
from elias.config.io import first_difference as first_difference
from elias.config.io import model_settings as model_settings
from elias.config.io import preset_names as preset_names
from elias.config.io import preset_summary as preset_summary
from elias.config.io import read_tree as read_tree
from elias.config.io import without_learning_rates as without_learning_rates
from elias.config.resolve import ResolvedConfig as ResolvedConfig
from elias.config.resolve import ResolvedEncoder as ResolvedEncoder
from elias.config.resolve import ResolvedIndex as ResolvedIndex
from elias.config.resolve import ResolvedRerank as ResolvedRerank
from elias.config.resolve import ResolvedStage as ResolvedStage
from elias.config.resolve import default_stages as default_stages
from elias.config.resolve import fill_sizes as fill_sizes
from elias.config.schema import DEFAULT_STAGES as DEFAULT_STAGES
from elias.config.schema import ONE_VS_ALL as ONE_VS_ALL
from elias.config.schema import CheckpointConfig as CheckpointConfig
from elias.config.schema import DataConfig as DataConfig
from elias.config.schema import EliasConfig as EliasConfig
from elias.config.schema import EncoderConfig as EncoderConfig
from elias.config.schema import EnsembleConfig as EnsembleConfig
from elias.config.schema import EvalConfig as EvalConfig
from elias.config.schema import IndexConfig as IndexConfig
from elias.config.schema import LossConfig as LossConfig
from elias.config.schema import RerankConfig as RerankConfig
from elias.config.schema import StageConfig as StageConfig
from elias.config.schema import TrackingConfig as TrackingConfig
