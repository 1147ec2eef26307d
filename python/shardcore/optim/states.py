"""Optimizer states of single parameters, under the optimizer's own names: whole, or as this rank's piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardcore import comm
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.protocols import ParameterSlot, ShardedOptimizerMark, find_slot


def full_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """One state of a parameter, such as ``"exp_avg"``, whole: in the parameter's shape and the state's dtype; a value
    that is one for all elements (``"step"``) as it is. None where there is none: a frozen parameter, or one that has
    not been updated yet (zeros with ``Offload(states="cpu")``). Collective over the shard axis.

    Raises:
        ConfigError: the parameter is not sharded, or the optimizer keeps no state of this name; on every rank.
        StateError: no optimizer holds the parameter, or its states were moved away by ``offload_states``.
    """
    slot = _slot_of(param, "full_state")
    if not slot.group.trainable:
        return None
    local = _optimizer_of(slot, "full_state").local_state(slot)
    kind, dtype, value = _agree(slot, name, local, "full_state")
    if kind == "none":
        return None
    if kind == "scalar":
        return torch.as_tensor(local.get(name, value), dtype=getattr(torch, dtype)).clone()
    return _assembled(slot, local.get(name), getattr(torch, dtype))


def set_full_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Set one state of a parameter on all ranks. Collective over the data-parallel axis.

    Args:
        value: of the parameter's shape, or one number where the state is one for all; the same on every rank.

    Raises:
        ConfigError: as :func:`full_state`, or ``value`` does not fit; on every rank.
        RankMismatchError: the ranks gave different values.
        StateError: the parameter is frozen, or has no state before its first update.
    """
    slot = _slot_of(param, "set_full_state")
    if slot.group.trainable and slot.numel == 0:
        return  # no optimizer keeps a state of no elements
    local = _existing(slot, name, "set_full_state")
    value = torch.as_tensor(value)
    per_element = local.kind == "elements"
    _agree_on_value(slot, value, tuple(param.shape) if per_element else (), "set_full_state")
    if name not in local.values:
        return
    if not per_element:
        _set_scalar(slot, local.values, name, value, "set_full_state")
        return
    start, stop, _ = slot.group.local_range(slot)
    _optimizer_of(slot, "set_full_state").set_local_state(slot, name, value.reshape(-1)[start:stop])


def local_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """A copy of this rank's piece of a state, 1-D; None where there is none here. Not collective.

    Raises:
        ConfigError: the parameter is not sharded, or the optimizer keeps no state of this name.
        StateError: as :func:`full_state`.
    """
    slot = _slot_of(param, "local_state")
    if not slot.group.trainable:
        return None
    local = _optimizer_of(slot, "local_state").local_state(slot)
    if not local:
        return None
    _check_name(slot, name, sorted(local), "local_state")
    return torch.as_tensor(local[name]).clone()


def set_local_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Set this rank's piece of a state. Not collective; nothing where this rank holds nothing of the parameter.

    Raises:
        ConfigError: another number of elements than the piece has, or an unknown name.
        StateError: as :func:`set_full_state`.
    """
    slot = _slot_of(param, "set_local_state")
    start, stop, _ = slot.group.local_range(slot)
    local = _optimizer_of(slot, "set_local_state").local_state(slot)
    if stop == start:
        return
    if not local:
        raise StateError(_no_state_yet(slot, "set_local_state"))
    _check_name(slot, name, sorted(local), "set_local_state")
    value = torch.as_tensor(value)
    target = local[name]
    if not isinstance(target, torch.Tensor) or target.dim() == 0:
        _set_scalar(slot, local, name, value, "set_local_state")
        return
    if value.numel() != target.numel():
        raise ConfigError(
            f"set_local_state: this rank's piece of {name!r} of parameter {slot.name!r} has {target.numel()} elements, "
            f"got {value.numel()}"
        )
    _optimizer_of(slot, "set_local_state").set_local_state(slot, name, value.reshape(-1))


class _Existing:
    """A state that exists on some rank: what this rank has of it, and whether it is one value or one per element."""

    def __init__(self, values: dict[str, Any], kind: str) -> None:
        self.values = values
        self.kind = kind


def _existing(slot: ParameterSlot, name: str, what: str) -> _Existing:
    optimizer = _optimizer_of(slot, what) if slot.group.trainable else None
    if optimizer is None:
        raise StateError(f"{what}: parameter {slot.name!r} is frozen and has no optimizer state")
    local = optimizer.local_state(slot)
    kind, _, _ = _agree(slot, name, local, what)
    if kind == "none":
        raise StateError(_no_state_yet(slot, what))
    return _Existing(local, kind)


def _slot_of(param: nn.Parameter, what: str) -> ParameterSlot:
    slot = find_slot(param) if isinstance(param, torch.Tensor) else None
    if slot is None:
        raise ConfigError(f"{what}: {type(param).__name__} is not a parameter of a sharded module")
    return slot


def _optimizer_of(slot: ParameterSlot, what: str) -> ShardedOptimizerMark:
    root = slot.group.root
    root.check_here("optim_states", what=what)
    for optimizer in reversed(root.live_optimizers()):
        if optimizer.holds(slot.param):
            return optimizer  # type: ignore[no-any-return]
    raise StateError(f"{what}: no optimizer holds parameter {slot.name!r}; make one by shardcore.optimizer(...)")


def _agree(slot: ParameterSlot, name: str, local: dict[str, Any], what: str) -> tuple[str, str, float | None]:
    """(kind, dtype, value if it is one for all) of a state as the ranks that hold some of the parameter see it."""
    everywhere = comm.exchange(_describe(name, local), slot.group.shard_axis, f"state {name} of {slot.name}")
    known = sorted({found for _, _, _, names in everywhere for found in names})
    if known:
        _check_name(slot, name, known, what)
    for kind, dtype, value, _ in everywhere:
        if kind != "none":
            return kind, dtype, value
    return "none", "float32", None


def _describe(name: str, local: dict[str, Any]) -> tuple[str, str, float | None, list[str]]:
    value = local.get(name)
    if value is None:
        return "none", "", None, sorted(local)
    if not isinstance(value, torch.Tensor):
        return "scalar", str(torch.as_tensor(value).dtype).removeprefix("torch."), value, sorted(local)
    dtype = str(value.dtype).removeprefix("torch.")
    return ("elements", dtype, None, sorted(local)) if value.dim() else ("scalar", dtype, value.item(), sorted(local))


def _assembled(slot: ParameterSlot, piece: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The whole state from the ranks' pieces. Collective over the shard axis."""
    axis = slot.group.shard_axis
    whole = torch.empty(slot.numel, dtype=dtype, device=slot.group.master.device)
    works = []
    for position in range(axis.size):
        start, stop, _ = slot.group.range_of_rank(slot, position)
        part = whole[start:stop]
        if position == axis.rank and piece is not None:
            part.copy_(piece)
        works.append(comm.broadcast(part, axis, position, slot.name))
    for work in works:
        work.wait()
    return whole.view(slot.param.shape)


def _agree_on_value(slot: ParameterSlot, value: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    """Raise on every rank unless all gave the same value of this shape. Collective over the data-parallel axis."""
    axis = slot.group.data_axis
    everywhere = comm.exchange([list(value.shape), comm.fingerprint(value)], axis, f"{what} {slot.name}")
    for rank, (found, _) in zip(axis.ranks, everywhere, strict=True):
        if tuple(found) != shape:
            raise ConfigError(
                f"{what}: the state of parameter {slot.name!r} has shape {shape}; got {tuple(found)} on rank {rank}"
            )
    if len({found for _, found in everywhere}) > 1:
        raise RankMismatchError(
            f"{what}: the ranks {list(axis.ranks)} gave different values for parameter {slot.name!r}; nothing was "
            "changed"
        )


def _set_scalar(slot: ParameterSlot, local: dict[str, Any], name: str, value: torch.Tensor, what: str) -> None:
    """One value for all elements."""
    if not isinstance(local[name], torch.Tensor):
        raise StateError(f"state {name!r} is a plain {type(local[name]).__name__} and cannot be set")
    _optimizer_of(slot, what).set_local_state(slot, name, value.reshape(()))


def _check_name(slot: ParameterSlot, name: str, known: list[str], what: str) -> None:
    if name not in known:
        raise ConfigError(
            f"{what}: the optimizer of parameter {slot.name!r} keeps no state {name!r}; it has {', '.join(known)}"
        )


def _no_state_yet(slot: ParameterSlot, what: str) -> str:
    return f"{what}: parameter {slot.name!r} has no optimizer state before its first update; make a step first"
