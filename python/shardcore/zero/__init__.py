"""ZeRO and plain data parallelism: one group mechanism, of which a stage is a setting."""

from shardcore.zero.access import gathered, local_shard, no_sync, reset_iteration, state_dict, summon
from shardcore.zero.building import empty_init, sharded_init
from shardcore.zero.communication import Communication
from shardcore.zero.pieces import gathered_pieces
from shardcore.zero.policy import Precision
from shardcore.zero.prefetch import PrefetchLimits
from shardcore.zero.sharding import default_segment_nbytes, shard
from shardcore.zero.targets import Target, Targets, targets_of

__all__ = [
    "Communication",
    "Precision",
    "PrefetchLimits",
    "Target",
    "Targets",
    "default_segment_nbytes",
    "empty_init",
    "gathered",
    "gathered_pieces",
    "local_shard",
    "no_sync",
    "reset_iteration",
    "shard",
    "sharded_init",
    "state_dict",
    "summon",
    "targets_of",
]
