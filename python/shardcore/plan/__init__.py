"""Plans: frozen values that say what goes where, made by the Rust core. No torch needed.

Every plan has ``digest()`` (equal on all ranks or something is wrong), ``explain()`` (a table for people) and
``to_json()``; :func:`first_difference` names the first place where two such documents disagree.

>>> from shardcore import plan
>>> layout = plan.shard_layout([("weight", 1000, "bf16", True), ("bias", 10, "bf16", True)], num_shards=4)
>>> layout.padded_numel, layout.shard_numel
(1024, 256)
>>> layout.ranges(3)
[('weight', 768, 1000, 0), ('bias', 0, 10, 232)]
"""

from __future__ import annotations

from shardcore._core import ShardLayout, ShardPlan, first_difference, groups, plan_shards, shard_layout

__all__ = ["ShardLayout", "ShardPlan", "first_difference", "groups", "plan_shards", "shard_layout"]
