"""Optimizers over sharded parameters, loss scaling and learning-rate schedules."""

from shardcore.optim.loss_scale import ConstantScale, DynamicScale
from shardcore.optim.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, build_scheduler
from shardcore.optim.sharded import ShardedOptimizer, optimizer

__all__ = [
    "ConstantScale",
    "DynamicScale",
    "LRRangeTest",
    "OneCycle",
    "ShardedOptimizer",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
    "optimizer",
]
