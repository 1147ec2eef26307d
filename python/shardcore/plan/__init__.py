"""Plans: frozen values that say what goes where, made by the Rust core. No torch needed.

Every plan has ``digest()`` (equal on all ranks or something is wrong), ``explain()`` (a table for people) and
``to_json()``; :func:`first_difference` names the first place where two such documents disagree.

>>> from shardcore import plan
>>> layout = plan.shard_layout([("weight", 1000, "bf16", True), ("bias", 10, "bf16", True)], num_shards=4)
>>> layout.padded_numel, layout.shard_numel
(1024, 256)
>>> layout.ranges(3)
[('weight', 768, 1000, 0), ('bias', 0, 10, 232)]

A step that uses three units forward and backward, with room for two of them:

>>> trace = [(unit, "forward") for unit in "abc"] + [(unit, "backward") for unit in "cba"]
>>> step = plan.prefetch(trace, {"a": 100, "b": 100, "c": 100}, budget=200)
>>> step.gathers  # (unit, use that starts it, use that needs it)
[('a', 0, 0), ('b', 0, 1), ('c', 1, 2), ('a', 4, 5)]
>>> step.bytes_gathered, step.bytes_on_demand, step.peak
(400, 600, 200)
"""

from __future__ import annotations

from shardcore._core import (
    PrefetchCoordinator,
    PrefetchPlan,
    ShardLayout,
    ShardPlan,
    first_difference,
    groups,
    plan_shards,
    prefetch,
    shard_layout,
)

__all__ = [
    "PrefetchCoordinator",
    "PrefetchPlan",
    "ShardLayout",
    "ShardPlan",
    "first_difference",
    "groups",
    "plan_shards",
    "prefetch",
    "shard_layout",
]
