"""Where the values of a model's parameters and buffers are written, whatever state the model is in.

A sharded model takes this rank's pieces into shards and masters. In a model that is being built, parameters on the meta
device and those that are away take them as their pieces (:mod:`pieces`); so nothing is whole. Any other tensor takes
all of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardcore.errors import StateError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import find_root, find_slot
from shardcore.zero.construction import find_piece
from shardcore.zero.pieces import Keeper, Piece, give_memory
from shardcore.zero.root import Root
from shardcore.zero.sharding import as_mesh

Read = Callable[[int, int, torch.Tensor], None]
"""``read(start, stop, out)`` writes elements [start, stop) of a flattened tensor into ``out`` [stop - start]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One parameter or persistent buffer of a model."""

    names: tuple[str, ...]
    """All its names; more than one where it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[Read], None]
    """Replace what this rank holds of it. Not collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """All that a checkpoint of the model holds."""

    axis: Axis
    """Over these ranks the model is, or will be, sharded."""
    targets: list[Target]
    publish: Callable[[], None]
    """After writing: let every parameter show its new values. Collective over the shard axis of a sharded model."""


def targets_of(model: nn.Module, mesh: Mesh | None = None) -> Targets:
    """The parameters and persistent buffers of ``model``. Collective, as a Mesh is, where it is not sharded yet.

    Args:
        mesh: over whose data-parallel axis a model that is not sharded yet will be; None means all ranks.

    Raises:
        StateError: a context shows the whole parameters of the sharded model, or its states are offloaded.
    """
    root: Root | None = find_root(model)
    named: dict[torch.Tensor, list[str]] = {}
    for name, tensor in _persistent(model):
        named.setdefault(tensor, []).append(name)
    if root is not None:
        root.check_here("lp_params", "hp_params", what="load_safetensors")
        if any(group.pins for group in root.groups):
            raise StateError("load_safetensors inside summon or GatheredParameters: leave the context first")
        root.rest()
        targets = [_target(tensor, names, _sharded_writer(tensor)) for tensor, names in named.items()]
        return Targets(axis=root.data_axis, targets=targets, publish=lambda: _publish(root))
    mesh = as_mesh(mesh)
    keeper = Keeper(mesh["dp"], mesh.device)
    targets = [_target(tensor, names, _building_writer(tensor, names[0], keeper)) for tensor, names in named.items()]
    return Targets(axis=mesh["dp"], targets=targets, publish=lambda: None)


def _publish(root: Root) -> None:
    for group in root.groups:
        group.end_load()


def _persistent(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Everything in ``state_dict``, without reading any of it."""
    found: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found


def _target(tensor: torch.Tensor, names: list[str], write: Callable[[Read], None]) -> Target:
    return Target(names=tuple(names), shape=tuple(tensor.shape), dtype=tensor.dtype, write=write)


def _sharded_writer(tensor: torch.Tensor) -> Callable[[Read], None]:
    slot = find_slot(tensor)
    if slot is None:
        return lambda read: _write_whole(tensor, read)
    return lambda read: slot.group.rewrite(slot, read)


def _building_writer(tensor: torch.Tensor, name: str, keeper: Keeper) -> Callable[[Read], None]:
    def write(read: Read) -> None:
        piece: Piece | None = find_piece(tensor)
        if piece is not None and piece.own is not None:
            _write_piece(tensor, piece.name, piece.keeper, piece.own.device, read)
        elif tensor.is_meta and isinstance(tensor, nn.Parameter) and tensor.numel() and keeper.axis.size > 1:
            _write_piece(tensor, name, keeper, keeper.device, read)
        else:
            if tensor.is_meta:
                give_memory(tensor, keeper.device, name)
            _write_whole(tensor, read)

    return write


def _write_piece(tensor: torch.Tensor, name: str, keeper: Keeper, device: torch.device, read: Read) -> None:
    ranges = keeper.split(tensor.numel())
    lengths = [stop - start for start, stop in ranges]
    own = torch.empty(sum(lengths), dtype=tensor.dtype, device=device)
    for (start, stop), out in zip(ranges, own.split(lengths), strict=True):
        read(start, stop, out)
    keeper.adopt_piece(tensor, name, own)


def _write_whole(tensor: torch.Tensor, read: Read) -> None:
    with torch.no_grad():
        if tensor.is_contiguous():
            read(0, tensor.numel(), tensor.detach().view(-1))
            return
        dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        read(0, tensor.numel(), dense.view(-1))
        tensor.copy_(dense)
