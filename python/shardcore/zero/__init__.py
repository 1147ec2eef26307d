"""ZeRO and plain data parallelism: one group mechanism, of which a stage is a setting."""

from shardcore.zero.access import local_shard, no_sync, reset_iteration, state_dict
from shardcore.zero.gathering import gathered, summon
from shardcore.zero.loading import load_state_dict
from shardcore.zero.policy import Precision
from shardcore.zero.prefetch import PrefetchLimits
from shardcore.zero.sharding import default_segment_nbytes, shard
from shardcore.zero.values import (
    full_grad,
    full_master,
    local_grad,
    local_master,
    set_full_grad,
    set_full_master,
    set_local_grad,
    set_local_master,
    update_full_grads,
)

__all__ = [
    "Precision",
    "PrefetchLimits",
    "default_segment_nbytes",
    "full_grad",
    "full_master",
    "gathered",
    "load_state_dict",
    "local_grad",
    "local_master",
    "local_shard",
    "no_sync",
    "reset_iteration",
    "set_full_grad",
    "set_full_master",
    "set_local_grad",
    "set_local_master",
    "shard",
    "state_dict",
    "summon",
    "update_full_grads",
]
