"""Over which ranks each unit is sharded, and the plan of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardcore import comm, plan
from shardcore.errors import ConfigError, PlanError
from shardcore.mesh import Axis, Mesh, Split
from shardcore.zero.prefetch import shown_names
from shardcore.zero.units import Assignment, parameter_dtype

if TYPE_CHECKING:
    from torch import nn

    from shardcore.zero.communication import Communication
    from shardcore.zero.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Over which ranks some parameters are sharded and copied."""

    shard: Axis
    replicate: Axis
    data: Axis
    """Both together: the ranks over which gradients are averaged."""
    nodes: Split | None = None
    """The shard axis by nodes, where shards travel in two steps."""
    secondary: Axis | None = None
    """The near ranks that hold a second shard of the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The groups of all units, in the order of the units."""

    groups: Sequence[tuple[int, plan.ShardLayout]]
    """(position of the unit, layout)."""
    reduce_order: Sequence[int]
    """The trainable ones, in the order in which all ranks reduce them: the last unit's come first."""


def choose_axes(mesh: Mesh, policy: Policy, communication: Communication, *, experts: bool) -> Axes:
    """Stage 0 replicates over all data-parallel ranks. Refuses what the stage has no use for."""
    communication.check(policy)
    data = mesh.data_axes(experts=experts)
    if not policy.shards_states:
        alone = Axis("shard", (mesh.rank,), 0, None, mesh)
        return Axes(shard=alone, replicate=data.every, data=data.every)
    if data.shard.key != mesh["shard"].key:  # cut by ep or extended by cp: how its ranks lie over nodes is not known
        if not experts and (communication.hierarchical or communication.secondary is not None):
            raise ConfigError(
                f"Communication(hierarchical=True) or (secondary=...) with cp={mesh['cp'].size}: shards then lie over "
                "'cp', too, and cannot travel in steps; leave it out"
            )
        return Axes(shard=data.shard, replicate=data.replicate, data=data.every)
    nodes, secondary = communication.node_split(mesh), communication.secondary_split(mesh)
    return Axes(
        shard=nodes.axis if nodes is not None else data.shard,
        replicate=data.replicate,
        data=data.every,
        nodes=nodes,
        secondary=secondary.inside if secondary is not None else None,
    )


def plan_units(assignment: Assignment, axes: dict[bool, Axes], segment_nbytes: int) -> Layout:
    """The plan that all ranks have made. Collective over the data-parallel axis.

    Args:
        axes: those of units without and with experts.
    """
    found: list[tuple[int, plan.ShardLayout, bool]] = []
    for experts in dict.fromkeys(unit.holds_experts for unit in assignment.units):
        chosen = [i for i, unit in enumerate(assignment.units) if unit.holds_experts == experts]
        units = [
            (unit.name, [(n, p.numel(), parameter_dtype(p), p.requires_grad) for n, p in unit.params.items()])
            for unit in (assignment.units[i] for i in chosen)
        ]
        made = plan.plan_shards(units, num_shards=axes[experts].shard.size, segment_nbytes=segment_nbytes)
        # Experts have one plan on all ranks, too, whichever of them a rank holds.
        comm.agree_on("the shard plan", made.digest(), made.to_json(), axes[False].data, plan.first_difference)
        reduced = set(made.reduce_order)
        found += [(chosen[unit], layout, i in reduced) for i, (unit, layout) in enumerate(made.groups)]
    found.sort(key=lambda group: group[0])
    return Layout(
        groups=[(unit, layout) for unit, layout, _ in found],
        reduce_order=[i for i in reversed(range(len(found))) if found[i][2]],
    )


def check_budget(module: nn.Module, assignment: Assignment, layout: Layout, budget: int | None) -> None:
    """Raise if a group is larger than what gathered parameters may take, saying what suffices where each unit is called
    by the modules around it.

    Raises:
        PlanError: the budget is too small for every step.
    """
    sizes = [group.padded_numel * group.itemsize for _, group in layout.groups]
    if budget is None or max(sizes, default=0) <= budget:
        return
    names = shown_names([assignment.units[unit].name for unit, _ in layout.groups])
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    path, used = _largest_use(module, assignment, layout, sizes)
    total = " + ".join(f"{names[i]!r} ({sizes[i]} bytes)" for i in used)
    raise PlanError(
        f"the budget of {budget} bytes is too small: unit {names[largest]!r} alone has {sizes[largest]} bytes (padding "
        f"included), and a forward through {path!r} has {total} = {sum(sizes[i] for i in used)} bytes in use at once; "
        "give that at least, or split the model into smaller units"
    )


def _largest_use(
    module: nn.Module, assignment: Assignment, layout: Layout, sizes: Sequence[int]
) -> tuple[str, list[int]]:
    """(module, groups) of the use that needs most bytes, with what the modules around it have in use meanwhile."""
    groups_of: dict[nn.Module, list[int]] = {}
    for group, (unit, _) in enumerate(layout.groups):
        for user in assignment.units[unit].modules:
            groups_of.setdefault(user, []).append(group)
    modules = dict(module.named_modules(remove_duplicate=False))
    best: tuple[str, list[int]] = ("", [])
    for name, user in modules.items():
        if user in groups_of:
            parts = name.split(".") if name else []
            around = [modules[".".join(parts[:depth])] for depth in range(len(parts) + 1)]
            used = sorted({group for outer in around for group in groups_of.get(outer, ())})
            if sum(sizes[i] for i in used) > sum(sizes[i] for i in best[1]):
                best = (name or "root", used)
    return best
