"""Whole and local views of a sharded model's parameters: ``summon``, ``local_shard``, ``state_dict``, ``no_sync``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root, find_slot
from shardcore.zero.group import ShardGroup
from shardcore.zero.root import Root


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside only add up on this rank; the next one outside, or ``optim.step()``, reduces. At every stage.

    At stages 2 and 3 the whole local gradients stay in memory meanwhile.
    """
    window = _root_of(module).window
    before, window.suspended = window.suspended, True
    try:
        yield
    finally:
        window.suspended = before


@contextmanager
def summon(module: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
    """Inside, every parameter is whole and readable on every rank. Collective over the shard axis.

    Args:
        writeback: keep what was written to the parameters; all ranks must write the same. Without it, writing raises at
            the end; at stage 3 the parameters are then those before, at other stages the edit has been made.

    Raises:
        StateError: a parameter was written to without ``writeback=True``; the message names it.
    """
    root = _root_of(module)
    root.rest()
    with _whole(root.groups, writeback=writeback):
        yield module


@contextmanager
def gathered(params: Iterable[nn.Parameter], modifier_rank: int | None = None, enabled: bool = True) -> Iterator[None]:
    """Inside, these parameters are whole. With ``modifier_rank``, that rank's edits reach all ranks and the masters.

    Collective over the data-parallel axis; parameters that are not sharded pass through.

    Raises:
        StateError: a parameter was written to without ``modifier_rank``; the message names it.
    """
    slots = [slot for slot in map(find_slot, params) if slot is not None] if enabled else []
    groups = sorted({slot.group for slot in slots}, key=lambda group: int(group.index))
    for root in {group.root for group in groups}:
        root.rest()
    with _whole(groups, writeback=modifier_rank is not None):
        yield
        if modifier_rank is not None:
            for group in groups:
                comm.broadcast(group.full, group.data_axis, modifier_rank, group.name).wait()


def local_shard(param: nn.Parameter) -> tuple[torch.Tensor, int, int]:
    """This rank's piece of a parameter as (tensor, start, stop): elements [start, stop) of the flattened parameter.

    The tensor is a view of the shard, to be read: masters and other ranks do not learn of what is written to it; edit
    inside ``summon(writeback=True)``. Empty where this rank holds nothing of it.

    Raises:
        ConfigError: the parameter is not sharded.
    """
    slot = find_slot(param)
    if slot is None:
        raise ConfigError(
            f"local_shard: the tensor of shape {tuple(param.shape)} is not a parameter of a sharded module"
        )
    start, stop, offset = slot.group.local_range(slot)
    if slot.group.state.value == "unsharding":
        slot.group.unshard(exact=False)
    return slot.group.own[offset : offset + stop - start], start, stop


def state_dict(model: nn.Module, full: bool = True, rank0_only: bool = True) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers on the CPU, under their unsharded names. Collective over the data-parallel
    axis.

    Args:
        full: whole tensors; False gives this rank's pieces of parameters (1-D) without communication.
        rank0_only: other ranks than the first get an empty dict (they take part in the gathers all the same).
    """
    root = _root_of(model)
    if not full:
        pieces = {slot.name: local_shard(slot.param)[0].cpu() for group in root.groups for slot in group.slots}
        return pieces | {name: buffer.cpu() for name, buffer in model.named_buffers()}
    state: dict[str, torch.Tensor] = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    if rank0_only and root.data_axis.rank != 0:
        return {}
    return {name: tensor.detach().to("cpu", copy=tensor.device.type == "cpu") for name, tensor in state.items()}


def reset_iteration(model: nn.Module) -> None:
    """After an exception in a step: drop gradients and return to the state between steps. Collective over all ranks."""
    _root_of(model).reset_iteration()


def install_state_dict_hooks(root: Root) -> None:
    """Let ``module.state_dict()`` give whole parameters: one group at a time is gathered and copied to the CPU."""
    if not root.policy.shards_params:
        return

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            raise StateError(
                "state_dict(keep_vars=True) is not possible at stage 3, whose parameters have no data; leave it out"
            )
        root.rest()
        for group in root.groups:
            group.exporting = True

    def after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for group in root.groups:
            group.end_export()
        # Inside summon the values are views of memory that goes when it ends.
        released_later = {group.full.untyped_storage().data_ptr() for group in root.groups if group.releases}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in released_later - {0}:
                state[name] = value.to("cpu", copy=True)

    root.module.register_state_dict_pre_hook(before)
    root.module.register_state_dict_post_hook(after)


@contextmanager
def _whole(groups: Iterable[ShardGroup], *, writeback: bool) -> Iterator[None]:
    groups = list(groups)
    were_sharded = [group for group in groups if group.state.value == "sharded"]
    for group in groups:
        group.unshard()
    before = [(slot, private.version(slot.param)) for group in groups for slot in group.slots]
    try:
        yield
    finally:
        for group in groups:
            group.check_storage()
            if writeback:
                group.adopt_edits()
        for group in were_sharded:
            group.reshard()
    edited = [slot.name for slot, version in before if private.version(slot.param) != version]
    if edited and not writeback:
        raise StateError(
            f"parameters {edited[:5]} were written to while gathered for reading, so the edit would be lost or differ "
            "between ranks; use summon(model, writeback=True), or GatheredParameters(..., modifier_rank=0)"
        )


def _root_of(module: nn.Module) -> Root:
    root = find_root(module)
    if root is None:
        raise ConfigError(
            f"{type(module).__name__} is not sharded; call shardcore.shard(model, ...) first, and pass that model"
        )
    return root  # type: ignore[no-any-return]
