"""``load_state_dict`` in unsharded names, at every stage: each rank takes its pieces, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import CheckpointError, RankMismatchError, StateError
from shardcore.protocols import ParameterSlot, find_experts, find_slot, part_of_whole, whole_shape
from shardcore.zero.root import Root
from shardcore.zero.sessions import root_of
from shardcore.zero.values import write_whole

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def load_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], rank0_only: bool = False, strict: bool = True
) -> Any:
    """Load whole parameters and buffers into a sharded model, at any stage. Collective over the data-parallel axis.

    Values are taken in their own precision: 16-bit parameters round them, their masters do not, unless these rest on a
    disk. Gradients and optimizer states stay. What ``model.load_state_dict`` would leave to hooks of modules (renaming
    old keys) is not done here.

    Args:
        state_dict: unsharded names to whole tensors, on any device. A tied parameter may stand under any of its names.
            A tensor-parallel model takes its parts of them; each row of the data-parallel axis loads for itself.
        rank0_only: only the data-parallel axis's first rank has it, and sends one tensor at a time; others pass ``{}``.
        strict: names that are missing or unexpected are errors.

    Returns:
        torch's result, with ``missing_keys`` and ``unexpected_keys``.

    Raises:
        CheckpointError: names are missing or unexpected (where ``strict``), or shapes differ (always): all of them, on
            every rank, before anything is changed. It is a RuntimeError, as torch's.
        RankMismatchError: without ``rank0_only``, the ranks have different values.
    """
    root = root_of(model)
    root.check_here("lp_params", "hp_params", what="load_state_dict")
    targets = _targets(root)
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"load_state_dict: expected a dict of tensors by name, got {type(state_dict).__name__}")
    entries = _described(state_dict, with_values=not rank0_only)
    everywhere = comm.exchange(entries, root.data_axis, "names to load")
    if rank0_only:
        entries = everywhere[0]
    else:
        _check_equal(everywhere, root)
    missing, unexpected = _check(entries, targets, strict, type(model).__name__)
    for name, (shape, dtype, _) in entries.items():
        if name in targets and shape is not None:
            value = _value(state_dict.get(name), shape, dtype, root, name) if rank0_only else state_dict[name]
            _write(targets[name], value.reshape(shape).expand(whole_shape(targets[name])))
    return private.incompatible_keys(missing, unexpected)


def install_load_hooks(root: Root) -> None:
    """Let ``module.load_state_dict()`` of the model and its parts fill released parameters piece by piece."""
    for module in root.module.modules():
        slots = [slot for slot in map(find_slot, module.parameters(recurse=False)) if slot is not None]
        if slots:
            module.register_load_state_dict_pre_hook(_before_load)
            module.register_load_state_dict_post_hook(_after_load)


def _before_load(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *others: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise StateError(
            "load_state_dict(assign=True) would replace the parameters of a sharded model; leave assign out, or load "
            "before shardcore.shard"
        )
    for slot in map(find_slot, module.parameters(recurse=False)):
        if slot is not None:
            slot.group.root.check_here("lp_params", "hp_params", what="load_state_dict")
            slot.group.root.about_to_change()
            slot.group.loading.add(slot.index)
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        slot, value = find_slot(param), state_dict.get(prefix + name)
        if slot is not None and isinstance(value, torch.Tensor) and find_experts(param) is None:  # else they differ
            comm.note_alike(slot.group.root.data_axis, "load_state_dict of", slot.name, value)


def _after_load(module: nn.Module, incompatible: Any) -> None:
    for slot in map(find_slot, module.parameters(recurse=False)):
        if slot is not None:
            slot.group.loading.discard(slot.index)


def _targets(root: Root) -> dict[str, torch.Tensor]:
    """Every name of every parameter and of every buffer that is saved."""
    targets: dict[str, torch.Tensor] = {}
    for prefix, module in root.module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        transient = private.non_persistent_buffers(module)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        targets.update({dot + name: buffer for name, buffer in buffers if name not in transient})
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        targets.update({dot + name: param for name, param in params})
    return targets


Entries = dict[str, tuple[list[int] | None, str, int]]


def _described(state_dict: Mapping[str, Any], *, with_values: bool) -> Entries:
    """name -> (shape, dtype, checksum); a shape of None for what is no tensor."""
    return {
        name: (list(value.shape), str(value.dtype), comm.fingerprint(value) if with_values else 0)
        if isinstance(value, torch.Tensor)
        else (None, type(value).__name__, 0)
        for name, value in state_dict.items()
    }


def _check_equal(everywhere: list[Entries], root: Root) -> None:
    first = everywhere[0]
    for rank, entries in zip(root.data_axis.ranks, everywhere, strict=True):
        if entries != first:
            names = [name for name in {**first, **entries} if first.get(name) != entries.get(name)]
            raise RankMismatchError(
                f"load_state_dict: rank {rank} has other values than rank {root.data_axis.ranks[0]} for {names[:5]}; "
                "load the same on every rank, or on the first alone with rank0_only=True. Nothing was changed"
            )


def _check(entries: Entries, targets: dict[str, torch.Tensor], strict: bool, model: str) -> tuple[list[str], list[str]]:
    """(missing, unexpected) names, or one error with everything that does not fit."""
    given = {find_slot(targets[name]) for name in entries if name in targets} - {None}
    missing = [name for name, tensor in targets.items() if name not in entries and find_slot(tensor) not in given]
    unexpected = [name for name in entries if name not in targets]
    problems = []
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    for name, (shape, found, _) in entries.items():
        if name not in targets:
            continue
        expected = list(whole_shape(targets[name]))
        if shape is None:
            problems.append(f"{name}: expected a tensor, got {found}")
        elif shape != expected and not (shape == [1] and expected == []):
            problems.append(f"{name}: shape {tuple(shape)}, the model has {tuple(expected)}")
    if problems:
        raise CheckpointError(
            f"load_state_dict into {model}: " + "; ".join(problems) + ". Nothing was loaded; strict=False leaves out "
            "names that are missing or unexpected"
        )
    return missing, unexpected


def _value(mine: torch.Tensor | None, shape: list[int], dtype: str, root: Root, name: str) -> torch.Tensor:
    """The first rank's tensor, on every rank. Collective over the data-parallel axis."""
    if root.data_axis.rank == 0 and mine is not None:
        value = mine.detach().to(root.device).contiguous()
    else:
        value = torch.empty(shape, dtype=_DTYPES[dtype], device=root.device)
    comm.broadcast(value, root.data_axis, 0, f"{name} to load").wait()
    return value


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    value = part_of_whole(target, value)
    slot: ParameterSlot | None = find_slot(target)
    if slot is not None:
        write_whole(slot, value)
        return
    with torch.no_grad():
        target.copy_(value)
