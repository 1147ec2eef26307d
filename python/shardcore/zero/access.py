"""A sharded model between steps: ``local_shard``, ``state_dict``, ``no_sync``, ``reset_iteration``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Axis
from shardcore.protocols import find_slot, find_tensor_axis
from shardcore.zero.root import Root
from shardcore.zero.sessions import root_of


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside only add up on this rank; the next one outside, or ``optim.step()``, reduces. At every stage.

    At stages 2 and 3 the whole local gradients stay in memory meanwhile.
    """
    window = root_of(module).window
    before, window.suspended = window.suspended, True
    try:
        yield
    finally:
        window.suspended = before


@contextmanager
def reduce_once(module: nn.Module) -> Iterator[None]:
    """Backwards inside only add up on this rank; leaving reduces their sum once. At every stage. Collective over the
    data-parallel axis on leaving. For several losses of one batch; at stages 2 and 3 the whole local gradients stay in
    memory meanwhile.

    After an exception inside nothing is reduced; the gradients so far are still there.
    """
    window = root_of(module).window
    with no_sync(module):
        yield
    if not window.suspended:
        window.flush()


def local_shard(param: nn.Parameter) -> tuple[torch.Tensor, int, int]:
    """This rank's piece of a parameter as (tensor, start, stop): elements [start, stop) of the flattened parameter.

    The tensor is a view of the shard, to be read: masters and other ranks do not learn of what is written to it; edit
    inside ``summon(writeback=True)``. It is a copy where the shard rests on a disk. Empty where this rank holds nothing
    of it.

    Raises:
        ConfigError: the parameter is not sharded.
    """
    slot = find_slot(param)
    if slot is None:
        raise ConfigError(
            f"local_shard: the tensor of shape {tuple(param.shape)} is not a parameter of a sharded module"
        )
    start, stop, offset = slot.group.local_range(slot)
    slot.group.root.check_here("lp_params", what="local_shard")
    if slot.group.state.value == "unsharding":
        slot.group.complete(exact=False)
    return slot.group.copy_of_own(offset, offset + stop - start), start, stop


def state_dict(model: nn.Module, full: bool = True, rank0_only: bool = True) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers on the CPU, under their unsharded names. Collective over the data-parallel
    axis, and over the tensor axis of a model that is split over one.

    Args:
        full: whole tensors; False gives this rank's pieces of parameters (1-D) without communication. Of a
            tensor-parallel model these are pieces of this rank's part.
        rank0_only: other ranks than the first get an empty dict (they take part in the gathers all the same). False
            gives every rank the same: of buffers that differ between ranks (running statistics) the first rank's.
    """
    root = root_of(model)
    if not full:
        pieces = {slot.name: local_shard(slot.param)[0].cpu() for group in root.groups for slot in group.slots}
        return pieces | {name: buffer.cpu() for name, buffer in model.named_buffers()}
    state: dict[str, torch.Tensor] = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    tensor_axis = find_tensor_axis(model.parameters())
    if rank0_only and (root.data_axis.rank or (tensor_axis is not None and tensor_axis.rank)):
        return {}
    if not rank0_only:
        _take_buffers_of_first(model, root.data_axis, state)
    return {name: tensor.detach().to("cpu", copy=tensor.device.type == "cpu") for name, tensor in state.items()}


def _take_buffers_of_first(model: nn.Module, axis: Axis, state: dict[str, torch.Tensor]) -> None:
    """Let the entries of buffers be those of the first data-parallel rank, as ranks keep their own. Collective."""
    for name, _ in model.named_buffers(remove_duplicate=False):
        if name in state:
            state[name] = state[name].detach().clone(memory_format=torch.contiguous_format)
            comm.broadcast(state[name], axis, 0, f"buffer {name}").wait()


def reset_iteration(model: nn.Module) -> None:
    """After an exception in a step: drop gradients and return to the state between steps. Collective over all ranks."""
    root_of(model).reset_iteration()


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
            group.begin_export()

    def after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for group in root.groups:
            group.end_export()
        # Inside summon the values are views of memory that goes when it ends.
        released_later = {private.storage_id(group.full) for group in root.groups if group.releases}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and private.storage_id(value) in released_later:
                state[name] = value.to("cpu", copy=True)

    root.module.register_state_dict_pre_hook(before)
    root.module.register_state_dict_post_hook(after)
