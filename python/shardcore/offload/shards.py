"""Host memory for the shards of a model: one pool, whose size is known before it is made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardcore import comm
from shardcore._core import check_host_memory
from shardcore.errors import StorageError
from shardcore.offload.host_pool import HostPool

if TYPE_CHECKING:
    from shardcore.mesh import Axis
    from shardcore.offload.policy import Offload


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """The sizes of one group's shard."""

    numel: int
    param: torch.dtype
    master: torch.dtype
    grad: torch.dtype
    """In which gradients are summed."""
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMemory:
    """The tensors [shard_numel] of one group's shard that rest outside the device; None for one that stays on it."""

    own: torch.Tensor | None = None
    master: torch.Tensor | None = None
    """Of no elements where masters rest on a disk."""
    grad: torch.Tensor | None = None
    grad_rests: bool = False
    """``grad`` is where reductions are summed up; else it is filled when all of a step's are complete."""


def place_shards(offload: Offload, shards: Sequence[ShardSpec], device: torch.device, axis: Axis) -> list[ShardMemory]:
    """Host memory for what of these shards rests there, or passes through on its way from the device. Collective.

    Raises:
        StorageError: the machine has less; the message has the sum, state by state.
    """
    wanted = [
        (group, name, dtype) for group, shard in enumerate(shards) for name, dtype in _wanted(offload, shard, device)
    ]
    listed = [(_WHAT[name], shards[group].numel, dtype) for group, name, dtype in wanted]
    pool = take_pool(listed, axis, pin=offload.pin)
    found: list[dict[str, Any]] = [{} for _ in shards]
    for group, name, dtype in wanted:
        found[group][name] = pool.tensor(shards[group].numel, dtype)
    if offload.states == "nvme":
        for memory, shard in zip(found, shards, strict=True):
            if shard.trainable:
                memory["master"] = torch.empty(0, dtype=shard.master)
    return [ShardMemory(**memory, grad_rests=offload.grads == "cpu") for memory in found]


def take_pool(tensors: Iterable[tuple[str, int, torch.dtype]], axis: Axis, *, pin: bool) -> HostPool:
    """A pool for exactly these tensors, each (what it is, numel, dtype), to be taken in this order. Collective over
    ``axis``: all ranks see whether the memory of the machine is enough for those on it before any takes its own.

    Raises:
        StorageError: the machine has less; the message has the sum by what the tensors are.
    """
    listed = list(tensors)
    nbytes = HostPool.required((numel, dtype) for _, numel, dtype in listed)
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        check_host_memory(f"offload ({num_ranks} ranks on this machine x {_sum_of(listed)})", nbytes * num_ranks)
        comm.max_over_ranks(torch.zeros(1, dtype=torch.uint8), axis, "host memory")
        return HostPool(nbytes, pin=pin)
    except StorageError as error:
        comm.report_failure(error)
        raise


def _sum_of(tensors: Sequence[tuple[str, int, torch.dtype]]) -> str:
    sums: dict[str, int] = {}
    for what, numel, dtype in tensors:
        sums[what] = sums.get(what, 0) + numel * dtype.itemsize
    terms = " + ".join(f"{what} {nbytes}" for what, nbytes in sums.items())
    return f"({terms} = {sum(sums.values())} bytes)"


_WHAT = {"own": "parameters", "master": "master weights", "grad": "gradients"}


def _wanted(offload: Offload, shard: ShardSpec, device: torch.device) -> list[tuple[str, torch.dtype]]:
    names = []
    if offload.params == "cpu":
        names.append(("own", shard.param))
    if offload.states is not None and shard.trainable:
        if offload.states == "cpu" and not (offload.params == "cpu" and shard.master == shard.param):
            names.append(("master", shard.master))
        if offload.grads == "cpu" or device.type != "cpu":
            names.append(("grad", shard.grad))
    return names
