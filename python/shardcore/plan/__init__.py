"""Plans: frozen values that say what goes where, and when, made by the Rust core. No torch needed.

Every plan has ``digest()`` (equal on all ranks or something is wrong), ``explain()`` (a table for people) and
``to_json()``; :func:`first_difference` names the first place where two such documents disagree.

>>> from shardcore import plan
>>> layout = plan.shard_layout([("weight", 1000, "bf16", True), ("bias", 10, "bf16", True)], num_shards=4)
>>> layout.padded_numel, layout.shard_numel
(1024, 256)
>>> layout.ranges(3)
[('weight', 768, 1000, 0), ('bias', 0, 10, 232)]

Which elements move where when four ranks become two, as (from rank, at, to rank, at, numel):

>>> plan.reshard(layout, plan.shard_layout([("weight", 1000, "bf16", True), ("bias", 10, "bf16", True)], num_shards=2))
[(0, 0, 0, 0, 256), (1, 0, 0, 256, 256), (2, 0, 1, 0, 256), (3, 0, 1, 256, 232), (3, 232, 1, 488, 10)]

A step that uses three units forward and backward, with room for two of them:

>>> trace = [(unit, "forward") for unit in "abc"] + [(unit, "backward") for unit in "cba"]
>>> step = plan.prefetch(trace, {"a": 100, "b": 100, "c": 100}, budget=200)
>>> step.gathers  # (unit, use that starts it, use that needs it)
[('a', 0, 0), ('b', 0, 1), ('c', 1, 2), ('a', 4, 5)]
>>> step.bytes_gathered, step.bytes_on_demand, step.peak
(400, 600, 200)

Pipeline schedules say what each rank computes, sends and receives, and in which order:

>>> schedule = plan.pipeline_schedule("1f1b", num_ranks=2, num_microbatches=3)
>>> [str(action) for action in schedule.program(0)]
['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
>>> schedule.check(comm="blocking", memory_cap=2)
>>> schedule.simulate(forward=1, input_grad=1, weight_grad=1).makespan
12.0
>>> plan.partition_layers([5, 1, 1, 1, 1, 1], num_parts=3)
[0, 1, 3, 6]
"""

from __future__ import annotations

from shardcore._core import (
    Action,
    PipelineSchedule,
    PrefetchCoordinator,
    PrefetchPlan,
    ShardLayout,
    ShardPlan,
    Simulation,
    Synthesis,
    check_boundaries,
    evaluation_schedule,
    first_difference,
    from_megatron_layout,
    groups,
    partition_layers,
    partition_marked,
    partition_uniform,
    pipeline_schedule,
    place_tiles,
    plan_shards,
    plan_swap,
    prefetch,
    reshard,
    schedule_names,
    shard_layout,
    share_writes,
    synthesize,
    to_megatron_layout,
)
from shardcore.plan.host_memory import Homes, HostMemory, host_memory
from shardcore.plan.layers import partition_by_class

__all__ = [
    "Action",
    "Homes",
    "HostMemory",
    "PipelineSchedule",
    "PrefetchCoordinator",
    "PrefetchPlan",
    "ShardLayout",
    "ShardPlan",
    "Simulation",
    "Synthesis",
    "check_boundaries",
    "evaluation_schedule",
    "first_difference",
    "from_megatron_layout",
    "groups",
    "host_memory",
    "partition_by_class",
    "partition_layers",
    "partition_marked",
    "partition_uniform",
    "pipeline_schedule",
    "place_tiles",
    "plan_shards",
    "plan_swap",
    "prefetch",
    "reshard",
    "schedule_names",
    "shard_layout",
    "share_writes",
    "synthesize",
    "to_megatron_layout",
]
