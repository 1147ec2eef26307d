"""Values of single parameters: masters and gradients, whole or as this rank's piece.

What is set reaches all of its copies: a master refreshes the parameter, on every rank. Setters check first, together,
that all ranks mean the same; where one is wrong, all raise and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.mesh import Axis
from shardcore.protocols import MASTER, ParameterSlot, ShardedOptimizerMark, find_slot
from shardcore.zero.group import ShardGroup


def full_master(param: nn.Parameter) -> torch.Tensor | None:
    """The whole master weight, in the parameter's shape and the master dtype (fp32 where parameters are 16-bit).
    Collective over the shard axis. None for a frozen parameter, which has no master.

    Raises:
        ConfigError: the parameter is not sharded.
        StateError: its state was moved away by ``offload_states``.
    """
    slot = _slot_of(param, "full_master")
    if not slot.group.trainable:
        return None
    return _assembled(slot, _master_piece(slot))


def set_full_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole master weight, and with it the parameter. Collective over the data-parallel axis.

    Args:
        value: a floating tensor of the parameter's shape, the same on every rank.

    Raises:
        ConfigError: the parameter is not sharded, or ``value`` does not fit it; on every rank.
        RankMismatchError: the ranks gave different values.
        StateError: the parameter is frozen, or its state was moved away.
    """
    slot = _slot_of(param, "set_full_master")
    _check_trainable(slot, "set_full_master")
    _check_master_here(slot.group)
    agree_on_value(value, tuple(param.shape), slot, "set_full_master")
    write_whole(slot, value)
    keeper = _keeper(slot)
    if keeper is not None:  # unrounded
        start, stop, _ = slot.group.local_range(slot)
        keeper.set_local_state(slot, MASTER, value.reshape(-1)[start:stop])


def local_master(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of this rank's piece of the master weight, 1-D; empty where this rank holds nothing of it, None where the
    parameter is frozen. Not collective.
    """
    slot = _slot_of(param, "local_master")
    return _master_piece(slot).clone() if slot.group.trainable else None


def set_local_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the master weight, and with it the parameter. At stages 1 and 2, where every rank holds
    the whole parameter, collective over the shard axis; at stage 3 without communication, but every rank sets its
    piece. Copies of a shard (hybrid sharding) must be set alike.

    Args:
        value: as many elements as :func:`local_master` returns.

    Raises:
        ConfigError: another number of elements.
        StateError: the parameter is frozen, or its state was moved away.
    """
    slot = _slot_of(param, "set_local_master")
    group = slot.group
    _check_trainable(slot, "set_local_master")
    _check_master_here(group)
    start, stop, _ = group.local_range(slot)
    problem = _misfit(value, (stop - start,), slot, flat=True)
    if not group.releases:
        problem = _first_problem(problem, group.shard_axis, slot)
    if problem is not None:
        raise ConfigError(f"set_local_master: {problem}")
    group.root.about_to_change()
    if group.state.value != "sharded":
        group.complete(exact=False)
    _set_master_piece(slot, value.reshape(-1))
    if not group.releases:
        _assemble_into(slot, _piece(slot, group.own_to_read), group.full[slot.offset : slot.offset + slot.numel])
    elif group.state.value == "unsharded":
        group.full[slot.offset + start : slot.offset + stop].copy_(_piece(slot, group.own_to_read))
    _note_write(slot)


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole reduced gradient: summed over the window's backwards, averaged over the data-parallel ranks, without
    the loss scale; before clipping until ``step()``, after it from then on. In the parameter's shape, at least fp32.
    None where no rank has one. Collective over the data-parallel axis.

    Gradients that wait to be reduced (inside ``no_sync``, before the boundary at stage 1) are reduced for it.

    Raises:
        ConfigError: the parameter is not sharded.
        StateError: its gradient was moved away by ``offload_states``.
    """
    slot = _slot_of(param, "full_grad")
    group = slot.group
    if group.grads is None or not _settled(slot):
        return None
    return _assembled(slot, _piece(slot, group.grads.shard)).div_(group.root.gradient_scale(slot))


def set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole reduced gradient, as :func:`full_grad` gives it; the parameter has a gradient then. Collective over
    the data-parallel axis.

    Raises:
        ConfigError, RankMismatchError, StateError: as :func:`set_full_master`.
    """
    slot = _slot_of(param, "set_full_grad")
    _check_trainable(slot, "set_full_grad")
    agree_on_value(value, tuple(param.shape), slot, "set_full_grad")
    _settled(slot, force=True)
    start, stop, _ = slot.group.local_range(slot)
    _write_grad(slot, value.reshape(-1)[start:stop])


def local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of this rank's piece of the reduced gradient, 1-D, as :func:`full_grad`. Collective at stages 0 and 1,
    whose gradients may wait to be reduced; not at stages 2 and 3. None where the parameter has no gradient; there, a
    piece of zeros to which this rank has added nothing counts as none.

    Raises:
        StateError: at stages 2 and 3, gradients that are not reduced (inside ``no_sync``).
    """
    slot = _slot_of(param, "local_grad")
    grads = slot.group.grads
    if grads is None or not _locally_settled(slot):
        return None
    piece = _piece(slot, grads.shard) / slot.group.root.gradient_scale(slot)
    return piece if grads.present[slot.index] or piece.any() else None


def set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the reduced gradient. Collective where :func:`local_grad` is.

    Raises:
        ConfigError: another number of elements than the piece has.
        StateError: the parameter is frozen, or its gradients are not reduced.
    """
    slot = _slot_of(param, "set_local_grad")
    _check_trainable(slot, "set_local_grad")
    start, stop, _ = slot.group.local_range(slot)
    problem = _misfit(value, (stop - start,), slot, flat=True)
    if not slot.group.policy.shards_grads:
        problem = _first_problem(problem, slot.group.data_axis, slot)
    if problem is not None:
        raise ConfigError(f"set_local_grad: {problem}")
    _locally_settled(slot)
    _write_grad(slot, value.reshape(-1))


def update_full_grads(
    params: Iterable[nn.Parameter], function: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each whole gradient by ``function(grad, param)``; parameters without one are left out. Collective over
    the data-parallel axis; the function must give the same on every rank.
    """
    for param in params:
        grad = full_grad(param)
        if grad is not None:
            set_full_grad(param, function(grad, param))


def _assembled(slot: ParameterSlot, piece: torch.Tensor) -> torch.Tensor:
    """The whole tensor of one parameter from every rank's piece. Collective over the shard axis."""
    whole = piece.new_empty(slot.numel)
    _assemble_into(slot, piece, whole)
    return whole.view(slot.param.shape)


def write_whole(slot: ParameterSlot, value: torch.Tensor) -> None:
    """Put the values of a whole parameter into master, shard and parameter of this rank. Not collective: every rank has
    them. Masters on a disk take them from the shard, in its precision, in the next step.
    """
    group = slot.group
    group.root.about_to_change()
    start, stop, _ = group.local_range(slot)
    if group.state.value != "sharded":
        group.complete(exact=False)
    with torch.no_grad():
        value = value.detach().to(group.full.device)
        if group.masters_are_away:
            _piece(slot, group.own).copy_(value.reshape(-1)[start:stop])
            group.num_edits += 1
        else:
            _piece(slot, group.master).copy_(value.reshape(-1)[start:stop])
            if group.has_masters:
                _piece(slot, group.own).copy_(_piece(slot, group.master))
        if group.state.value == "unsharded":
            group.full[slot.offset : slot.offset + slot.numel].copy_(value.to(group.master.dtype).reshape(-1))
    _note_write(slot)


def agree_on_value(value: object, shape: tuple[int, ...], slot: ParameterSlot, what: str) -> None:
    """Raise on every rank unless all gave the same values of this shape. Collective over the data-parallel axis."""
    problem = _misfit(value, shape, slot)
    mine = None if problem is not None or not isinstance(value, torch.Tensor) else comm.fingerprint(value)
    everywhere = comm.exchange([problem, mine], slot.group.data_axis, f"{what} {slot.name}")
    for position, (theirs, _) in enumerate(everywhere):
        if theirs is not None:
            raise ConfigError(f"{what}: {problem or f'{theirs} (rank {slot.group.data_axis.ranks[position]})'}")
    if len({found for _, found in everywhere}) > 1:
        raise RankMismatchError(
            f"{what}: the ranks {list(slot.group.data_axis.ranks)} gave different values for parameter {slot.name!r}; "
            "all ranks give the same whole tensor (broadcast it first). Nothing was changed"
        )


def _slot_of(param: nn.Parameter, what: str) -> ParameterSlot:
    slot = find_slot(param) if isinstance(param, torch.Tensor) else None
    if slot is None:
        found = f"the tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else type(param).__name__
        raise ConfigError(f"{what}: {found} is not a parameter of a sharded module")
    return slot


def _check_trainable(slot: ParameterSlot, what: str) -> None:
    if not slot.group.trainable:
        raise StateError(
            f"{what}: parameter {slot.name!r} is frozen and has neither master nor gradient; write to it inside "
            "shardcore.summon(model, writeback=True) or GatheredParameters(..., modifier_rank=0)"
        )


def _check_master_here(group: ShardGroup) -> None:
    """Masters have what the user wrote into whole parameters."""
    group.root.check_here("hp_params" if group.has_masters else "lp_params", what="reading a master weight")
    group.adopt_edits_if_any()


def _keeper(slot: ParameterSlot) -> ShardedOptimizerMark | None:
    """The optimizer with whose states the master rests on a disk, if it does."""
    if not slot.group.masters_are_away:
        return None
    holding = [each for each in slot.group.root.live_optimizers() if each.holds(slot.param)]
    return holding[-1] if holding else None


def _master_piece(slot: ParameterSlot) -> torch.Tensor:
    """This rank's piece of the master weight."""
    group = slot.group
    _check_master_here(group)
    keeper = _keeper(slot)
    if keeper is not None:
        return keeper.local_master(slot)
    return (
        _piece(slot, group.own_to_read).to(group.master.dtype) if group.masters_are_away else _piece(slot, group.master)
    )


def _set_master_piece(slot: ParameterSlot, value: torch.Tensor) -> None:
    """Set this rank's piece of the master weight, and the shard of the parameter."""
    group, keeper = slot.group, _keeper(slot)
    if keeper is not None:
        keeper.set_local_state(slot, MASTER, value)
        return
    if not group.masters_are_away:
        value = _piece(slot, group.master).copy_(value)
    if group.has_masters:
        _piece(slot, group.own).copy_(value)
    group.num_edits += group.masters_are_away


def _settled(slot: ParameterSlot, *, force: bool = False) -> bool:
    group = slot.group
    group.root.check_here("lp_grads", "contiguous_grad_buffer", what="reading a gradient")
    present: bool = group.root.settle_gradient(slot)
    if force and not group.grads.was_reduced:
        group.grads.settle()
    return present


def _locally_settled(slot: ParameterSlot) -> bool:
    """Whether the shard holds this window's gradients."""
    grads = slot.group.grads
    slot.group.root.check_here("lp_grads", "contiguous_grad_buffer", what="reading a gradient")
    if not slot.group.policy.shards_grads:
        return _settled(slot)
    grads.finish_reduce()
    if grads.has_local:
        raise StateError(
            f"the gradient of parameter {slot.name!r} is not reduced over the ranks yet: leave no_sync, or call "
            "full_grad (safe_get_full_grad) on every rank"
        )
    return bool(grads.was_reduced)


def _write_grad(slot: ParameterSlot, piece: torch.Tensor) -> None:
    group = slot.group
    if not group.grads.was_reduced:
        group.grads.settle()
    with torch.no_grad():
        _piece(slot, group.grads.shard).copy_(piece).mul_(group.root.gradient_scale(slot))
    group.grads.present[slot.index] = group.grads.has_sum[slot.index] = True
    if group.grads.exposed:
        group.grads.show([slot.index])


def _piece(slot: ParameterSlot, shard: torch.Tensor) -> torch.Tensor:
    start, stop, offset = slot.group.local_range(slot)
    return shard[offset : offset + stop - start]


def _assemble_into(slot: ParameterSlot, piece: torch.Tensor, whole: torch.Tensor) -> None:
    axis = slot.group.shard_axis
    works = []
    for position in range(axis.size):
        start, stop, _ = slot.group.range_of_rank(slot, position)
        part = whole[start:stop]
        if position == axis.rank:
            part.copy_(piece)
        works.append(comm.broadcast(part, axis, position, slot.name))
    for work in works:
        work.wait()


def _note_write(slot: ParameterSlot) -> None:
    """A graph that saved the parameter must refuse its backward; the group's baseline and open contexts follow."""
    group = slot.group
    group.versions.count_write(slot.index)
    group.invalidate_copies()
    group.note_versions()
    for session in group.root.sessions:
        session.refresh([group], {slot: 1})


def _misfit(value: object, shape: tuple[int, ...], slot: ParameterSlot, *, flat: bool = False) -> str | None:
    """What is wrong with a value for this parameter."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        found = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        return f"parameter {slot.name!r} takes a floating tensor, got {found}"
    with private.without_torch_function():
        found_shape = (value.numel(),) if flat else tuple(value.shape)
    if found_shape != shape:
        expected = f"{shape[0]} elements, this rank's piece" if flat else f"shape {shape}"
        return f"parameter {slot.name!r} takes {expected}; got shape {tuple(value.shape)}"
    return None


def _first_problem(problem: str | None, axis: Axis, slot: ParameterSlot) -> str | None:
    """This rank's problem, or that of another, so that all raise. Collective over the axis."""
    everywhere = comm.exchange(problem, axis, f"piece of {slot.name}")
    others = [f"{theirs} (rank {axis.ranks[i]})" for i, theirs in enumerate(everywhere) if theirs is not None]
    return problem or (others[0] if others else None)
