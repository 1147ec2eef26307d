"""The configuration room: DeepSpeed's JSON format, checked against one key table and turned into frozen sections.

Nothing here imports torch.
"""

from __future__ import annotations

from shardcore.config.batch import BatchSizes, drop_in_errors, solve_batch
from shardcore.config.config import Config, IgnoredKey
from shardcore.config.keys import Entry, Field, Ignored, Misplaced, Removed, Unsupported
from shardcore.config.load import Classes, load_config
from shardcore.config.names import edit_distance, nearest, unknown_name, unknown_names
from shardcore.config.parameters import OPTIMIZERS, REQUIRED, SCHEDULES, Parameter, schedule_settings
from shardcore.config.read import Source, parse_json, read_source
from shardcore.config.sections import (
    ActivationConfig,
    BatchConfig,
    BF16Config,
    CheckpointConfig,
    DataConfig,
    DataTypesConfig,
    FloatDtype,
    FP16Config,
    GradientConfig,
    LeafConfig,
    LoggingConfig,
    NetworkConfig,
    OptimizerConfig,
    SchedulerConfig,
    TensorConfig,
    ZeroConfig,
)
from shardcore.config.table import SECTION_KEYS, TABLE, lookup

__all__ = [
    "OPTIMIZERS",
    "REQUIRED",
    "SCHEDULES",
    "SECTION_KEYS",
    "TABLE",
    "ActivationConfig",
    "BF16Config",
    "BatchConfig",
    "BatchSizes",
    "CheckpointConfig",
    "Classes",
    "Config",
    "DataConfig",
    "DataTypesConfig",
    "Entry",
    "FP16Config",
    "Field",
    "FloatDtype",
    "GradientConfig",
    "Ignored",
    "IgnoredKey",
    "LeafConfig",
    "LoggingConfig",
    "Misplaced",
    "NetworkConfig",
    "OptimizerConfig",
    "Parameter",
    "Removed",
    "SchedulerConfig",
    "Source",
    "TensorConfig",
    "Unsupported",
    "ZeroConfig",
    "drop_in_errors",
    "edit_distance",
    "load_config",
    "lookup",
    "nearest",
    "parse_json",
    "read_source",
    "schedule_settings",
    "solve_batch",
    "unknown_name",
    "unknown_names",
]
