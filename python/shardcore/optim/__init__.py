"""Optimizers over sharded parameters, loss scaling and learning-rate schedules."""

from shardcore.optim.cpu import CPUOptimizer, cpu_norm
from shardcore.optim.cpu_rules import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion
from shardcore.optim.loss_scale import ConstantScale, DynamicScale
from shardcore.optim.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
    schedule_names,
)
from shardcore.optim.sharded import ShardedOptimizer, optimizer
from shardcore.optim.states import full_state, local_state, set_full_state, set_local_state
from shardcore.optim.targets import optimizer_names

__all__ = [
    "CPUSGD",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CPUOptimizer",
    "ConstantScale",
    "DynamicScale",
    "LRRangeTest",
    "OneCycle",
    "ShardedOptimizer",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
    "cpu_norm",
    "full_state",
    "local_state",
    "optimizer",
    "optimizer_names",
    "schedule_names",
    "set_full_state",
    "set_local_state",
]
