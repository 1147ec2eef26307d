"""``shardcore.shard``: make a module train sharded, by any ZeRO stage, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcore import comm, plan
from shardcore.blocks import Units
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Axis, Mesh
from shardcore.offload import Offload, ShardMemory
from shardcore.protocols import ParameterSlot, attach_root, attach_slot, find_pipeline, find_root, find_slot
from shardcore.zero import hooks
from shardcore.zero.access import install_state_dict_hooks
from shardcore.zero.arguments import check_arguments, check_init, expect
from shardcore.zero.communication import Communication
from shardcore.zero.gathering import Gathering
from shardcore.zero.group import ShardGroup
from shardcore.zero.guard import refuse_pickle
from shardcore.zero.host_heap import give_back_freed_memory, keep_freed_memory
from shardcore.zero.leaves import add_external_parameters
from shardcore.zero.loading import install_load_hooks
from shardcore.zero.materialise import Init, materialise
from shardcore.zero.pieces import cast_piece
from shardcore.zero.placement import check_offload, place
from shardcore.zero.planning import Axes, Layout, check_budget, choose_axes, plan_units
from shardcore.zero.policy import Policy, Precision
from shardcore.zero.prefetch import PrefetchLimits
from shardcore.zero.root import Root, Unit
from shardcore.zero.units import Assignment, assign_units, check_parameters

if TYPE_CHECKING:
    from shardcore.mesh import DeviceMesh


def default_segment_nbytes(device: torch.device) -> int:
    """A unit's parameters are split into groups of at most this size, which bounds the buffers of one reduction. On
    CPU it is what the heap keeps when it is released.
    """
    return 28 << 20 if device.type == "cpu" else 64 << 20


def shard(
    module: nn.Module,
    mesh: Mesh | Axis | DeviceMesh | None = None,
    stage: int = 3,
    units: Units = "auto",
    precision: Precision | str | torch.dtype | None = None,
    offload: Offload | None = None,
    budget: int | None = None,
    segment_nbytes: int | None = None,
    prefetch: PrefetchLimits | None = None,
    communication: Communication | None = None,
    init: Init | None = None,
) -> nn.Module:
    """Shard ``module`` over the data-parallel axis of ``mesh``, in place. Collective over that axis.

    All ranks end with the parameters and buffers of the axis's first rank. Parameters keep identity, full shape, dtype
    and ``requires_grad``; at stage 3 their data are there only while the module uses them. Parameters and buffers on
    the meta device are given memory and initialised here, at most a unit of them at a time
    (:mod:`shardcore.zero.materialise` says by which calls).

    Args:
        module: the model; its forward, ``loss.backward()`` and ``state_dict()`` work as before (the last is
        collective).
        mesh: a :class:`shardcore.Mesh`, its ``["dp"]`` axis, or a DeviceMesh; None means all ranks.
        stage: 0 replicates (DDP), 1 shards optimizer states, 2 gradients too, 3 parameters too.
        units: what is gathered and reduced as a whole; see :func:`shardcore.zero.units.assign_units`.
        budget: at stage 3, the most bytes of gathered parameters per rank; the step is planned under it, and units stay
        gathered from forward to backward where it allows. None means two units besides what the model itself holds.
        offload: which states rest in host memory or on a disk; see :class:`shardcore.Offload`.
        precision: dtypes and loss scaling, or only the parameters' dtype (``"bf16"``, ``torch.bfloat16``); None keeps
        the parameters' own dtypes. Masters of 16-bit parameters are fp32.
        segment_nbytes: largest group of parameters, in bytes of the parameter dtype; bounds the reduction buffers.
        None means :func:`shardcore.zero.default_segment_nbytes`.
        prefetch: finer limits than ``budget``.
        communication: what travels between ranks in fewer bits or over fewer links; None sends everything in full.
        init: initialises the own parameters and buffers of the module that it is called with, for each module that has
        some on the meta device; None means the modules' own way.

    Returns:
        The same module.

    Raises:
        ConfigError: a wrong stage, mesh, budget or ``init``, parameters that cannot be sharded, an offload that the
            stage does not have.
        StorageError: less host memory than the offload needs, with the arithmetic.
        PlanError: a group of parameters that does not fit into the budget.
        StateError: the module, or a part of it, is sharded already.
        RankMismatchError: ranks built different models, or gave different settings.
    """
    policy = Policy(stage=stage)
    precision = Precision.of(precision)
    communication = expect("communication", communication or Communication(), Communication)
    check_offload(offload, policy)
    prefetch = _limits(budget, prefetch, policy)
    check_init(init)
    mesh = as_mesh(mesh, module)
    check_arguments(module, mesh, policy, precision, communication, prefetch, segment_nbytes)
    axes = {experts: choose_axes(mesh, policy, communication, experts=experts) for experts in (False, True)}
    if mesh.device.type == "cpu":
        give_back_freed_memory()
    _check_unsharded(module)
    check_parameters(module)
    assignment = assign_units(module, units)
    materialise(module, mesh, assignment, init)
    dropped = _cast(module, precision, mesh.device)
    layout = plan_units(assignment, axes, segment_nbytes or default_segment_nbytes(mesh.device))
    check_budget(module, assignment, layout, prefetch.budget if prefetch is not None else None)
    _broadcast_buffers(module, axes[False].data)
    memory = place(offload, assignment, layout, precision, mesh)
    groups = _make_groups(assignment, layout, policy, precision, axes, communication, mesh.device, memory)
    root = Root(
        module,
        _make_units(module, assignment, layout, groups),
        groups,
        reduce_order=layout.reduce_order,
        policy=policy,
        precision=precision,
        data_axis=axes[False].data,
        shard_axis=axes[False].shard,
        device=mesh.device,
        limits=prefetch,
    )
    root.offload = offload or Offload()
    _install(root, dropped)
    return module


def _install(root: Root, dropped_gradient: str | None) -> None:
    """Make the module act by itself."""
    root.dropped_gradient = dropped_gradient
    attach_root(root.module, root)
    hooks.install(root)
    install_state_dict_hooks(root)
    install_load_hooks(root)
    add_external_parameters(root.module)
    root.watch()
    if root.device.type == "cpu":
        keep_freed_memory()
    object.__setattr__(root.module, "__deepcopy__", _refuse_copy)
    object.__setattr__(root.module, "__reduce_ex__", refuse_pickle)


def _refuse_copy(memo: dict[int, Any]) -> nn.Module:
    raise StateError(
        "a sharded model cannot be copied (copy.deepcopy, AveragedModel, ...): copy the model before shardcore.shard, "
        "or load shardcore.state_dict(model) into another model of its class"
    )


def _limits(budget: int | None, prefetch: PrefetchLimits | None, policy: Policy) -> PrefetchLimits | None:
    if budget is None:
        return None if prefetch is None else expect("prefetch", prefetch, PrefetchLimits)
    limits = PrefetchLimits(budget=budget)
    if policy.stage < 3:
        raise ConfigError(
            f"shard(stage={policy.stage}, budget={budget!r}): below stage 3 parameters are whole all the time, so that "
            "no budget bounds them; use stage=3, or leave the budget out"
        )
    if prefetch is not None:
        raise ConfigError("shard(budget=..., prefetch=...): give one of them; PrefetchLimits has a budget, too")
    return limits


def as_mesh(mesh: Mesh | Axis | DeviceMesh | None, module: nn.Module | None = None) -> Mesh:
    """The mesh that a ``mesh=`` argument means; None means the one of a pipeline's module, or all ranks."""
    if mesh is None:
        part = None if module is None else find_pipeline(module)
        return Mesh() if part is None else part.mesh
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Axis):
        if mesh.name != "dp" or mesh.mesh is None:
            raise ConfigError(f"shard(mesh=<axis {mesh.name!r}>): give the mesh or its data-parallel axis, mesh['dp']")
        return mesh.mesh
    return Mesh.from_torch(mesh)


def _check_unsharded(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if find_root(child) is not None:
            raise StateError(
                f"module {name or 'root'!r} ({type(child).__name__}) is sharded already; shard each module once"
            )
    for name, param in module.named_parameters():
        if find_slot(param) is not None:
            raise StateError(f"parameter {name!r} belongs to another sharded module; shard a module that contains both")


def _cast(module: nn.Module, precision: Precision, device: torch.device) -> str | None:
    """Parameters to their dtype and device, buffers to the device only. Returns a parameter that had a gradient, if any
    had; it is dropped.
    """
    dropped = None
    with torch.no_grad():
        for name, param in module.named_parameters():
            if param.grad is not None and not param.grad.is_meta and bool(param.grad.any()):
                dropped = dropped or name
            if not cast_piece(param, device, precision.param_dtype):
                param.data = param.data.to(device=device, dtype=precision.param_dtype)
            param.grad = None
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = buffer.to(device)
    return dropped


def _broadcast_buffers(module: nn.Module, axis: Axis) -> None:
    for name, buffer in module.named_buffers():
        dense = buffer.contiguous()
        comm.broadcast(dense, axis, 0, f"buffer {name}").wait()
        if dense is not buffer:
            buffer.copy_(dense)


def _make_groups(
    assignment: Assignment,
    planned: Layout,
    policy: Policy,
    precision: Precision,
    axes_of: dict[bool, Axes],
    communication: Communication,
    device: torch.device,
    memory: list[ShardMemory],
) -> list[ShardGroup]:
    groups = []
    model = comm.name_of_next_model(axes_of[False].shard)
    for index, (unit_index, layout) in enumerate(planned.groups):
        unit = assignment.units[unit_index]
        axes = axes_of[unit.holds_experts]
        slots = [
            ParameterSlot(
                group=None,
                index=i,
                name=name,
                aliases=assignment.names[unit.params[name]],
                param=unit.params[name],
                numel=numel,
                offset=offset,
            )
            for i, (name, numel, offset) in enumerate(layout.entries())
        ]
        group = ShardGroup(
            index,
            f"{unit.name}#{index}{model}",
            layout,
            slots,
            policy=policy,
            precision=precision,
            shard_axis=axes.shard,
            replicate_axis=axes.replicate,
            data_axis=axes.data,
            device=device,
            gathering=_gathering(layout, slots, axes, communication),
            memory=memory[index],
        )
        for slot in slots:
            attach_slot(slot)
        groups.append(group)
    return groups


def _gathering(
    layout: plan.ShardLayout, slots: list[ParameterSlot], axes: Axes, communication: Communication
) -> Gathering:
    dtype = slots[0].param.dtype if slots else torch.float32
    route = comm.Route(axes.shard, axes.nodes, communication.coding(dtype, layout.trainable))
    return Gathering(route, axes.secondary)


def _make_units(module: nn.Module, assignment: Assignment, planned: Layout, groups: list[ShardGroup]) -> list[Unit]:
    """One unit per module that uses groups, in module order; the root has one even without groups of its own."""
    names = {m: name or "root" for name, m in module.named_modules()}
    units = {module: Unit("root", module)}
    for spec in assignment.units:
        for user in spec.modules:
            units.setdefault(user, Unit(names[user], user))
    for (unit_index, _), group in zip(planned.groups, groups, strict=True):
        for user in assignment.units[unit_index].modules:
            units[user].groups.append(group)
    order = {m: i for i, m in enumerate(names)}
    return sorted(units.values(), key=lambda unit: order[unit.module])
