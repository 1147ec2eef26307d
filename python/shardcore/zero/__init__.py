"""ZeRO and plain data parallelism: one group mechanism, of which a stage is a setting."""

from shardcore.zero.access import local_shard, no_sync, reduce_once, reset_iteration, state_dict
from shardcore.zero.building import empty_init, sharded_init
from shardcore.zero.communication import Communication
from shardcore.zero.leaves import (
    get_leaf_modules,
    register_external_parameter,
    set_leaf_modules,
    unregister_external_parameter,
    unset_leaf_modules,
)
from shardcore.zero.loading import load_state_dict
from shardcore.zero.offloading import offload_states, reload_states
from shardcore.zero.pieces import gathered_pieces
from shardcore.zero.policy import Precision
from shardcore.zero.prefetch import PrefetchLimits
from shardcore.zero.scaling import mark_scaled
from shardcore.zero.sessions import gathered, summon
from shardcore.zero.sharding import default_segment_nbytes, shard
from shardcore.zero.targets import Target, Targets, targets_of
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
    "Communication",
    "Precision",
    "PrefetchLimits",
    "Target",
    "Targets",
    "default_segment_nbytes",
    "empty_init",
    "full_grad",
    "full_master",
    "gathered",
    "gathered_pieces",
    "get_leaf_modules",
    "load_state_dict",
    "local_grad",
    "local_master",
    "local_shard",
    "mark_scaled",
    "no_sync",
    "offload_states",
    "reduce_once",
    "register_external_parameter",
    "reload_states",
    "reset_iteration",
    "set_full_grad",
    "set_full_master",
    "set_leaf_modules",
    "set_local_grad",
    "set_local_master",
    "shard",
    "sharded_init",
    "state_dict",
    "summon",
    "targets_of",
    "unregister_external_parameter",
    "unset_leaf_modules",
    "update_full_grads",
]
