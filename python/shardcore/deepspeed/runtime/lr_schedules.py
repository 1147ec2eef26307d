"""``deepspeed.runtime.lr_schedules``: the schedules of :mod:`shardcore.optim`."""

from shardcore.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, schedule_names

VALID_LR_SCHEDULES = list(schedule_names())

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]
