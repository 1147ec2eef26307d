"""Pipeline parallelism: a model in stages over ranks, trained by any schedule of :mod:`shardcore.plan`."""

from shardcore.pipeline.auto import AutoReport, AutoSchedule
from shardcore.pipeline.layers import BuiltLayer, build_layers
from shardcore.pipeline.pipeline import Pipeline
from shardcore.pipeline.randomness import RandomKey, restored_randomness
from shardcore.pipeline.recompute import Recompute
from shardcore.pipeline.skips import holding, pop, stash
from shardcore.pipeline.specs import Arguments, LayerSpec, TiedLayerSpec

__all__ = [
    "Arguments",
    "AutoReport",
    "AutoSchedule",
    "BuiltLayer",
    "LayerSpec",
    "Pipeline",
    "RandomKey",
    "Recompute",
    "TiedLayerSpec",
    "build_layers",
    "holding",
    "pop",
    "restored_randomness",
    "stash",
]
