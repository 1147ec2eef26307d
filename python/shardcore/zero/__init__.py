"""ZeRO and plain data parallelism: one group mechanism, of which a stage is a setting."""

from shardcore.zero.access import gathered, local_shard, no_sync, reset_iteration, state_dict, summon
from shardcore.zero.communication import Communication
from shardcore.zero.policy import Precision
from shardcore.zero.prefetch import PrefetchLimits
from shardcore.zero.sharding import default_segment_nbytes, shard

__all__ = [
    "Communication",
    "Precision",
    "PrefetchLimits",
    "default_segment_nbytes",
    "gathered",
    "local_shard",
    "no_sync",
    "reset_iteration",
    "shard",
    "state_dict",
    "summon",
]
