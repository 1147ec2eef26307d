"""Host memory for the shards of a model: one pool, whose size is known before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardcore.offload.shard_store import ShardStore, StoredShard
from shardcore.offload.taking import take_pool

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
    stored: StoredShard | None = None
    """The shard of the parameters where it rests on a disk."""
    master: torch.Tensor | None = None
    """Of no elements where masters rest on a disk."""
    grad: torch.Tensor | None = None
    updates_on_host: bool = False
    """Whether the CPU updates the masters."""
    grad_rests: bool = False
    """``grad`` is where reductions are summed up; else it is filled when all of a step's are complete."""

    @property
    def has_own(self) -> bool:
        """Whether the shard of the parameters rests outside the device."""
        return self.own is not None or self.stored is not None


def place_shards(offload: Offload, shards: Sequence[ShardSpec], device: torch.device, axis: Axis) -> list[ShardMemory]:
    """Host memory for what of these shards rests there, or passes through on its way from the device, and a file for
    parameters that rest on a disk. Collective.

    Raises:
        StorageError: the machine has less; the message has the sum, state by state. Or the disk has.
    """
    homes = offload.homes(device)
    on_host = homes.on_host([shard.numel if shard.trainable else None for shard in shards])
    wanted = [
        (group, name, {"own": shard.param, "master": shard.master, "grad": shard.grad}[name])
        for group, (shard, is_there) in enumerate(zip(shards, on_host, strict=True))
        for name in homes.resting(on_host=is_there, masters_differ=shard.master != shard.param)
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
    if offload.params == "nvme":
        store = ShardStore(offload, [(shard.numel, shard.param) for shard in shards], device, axis)
        for index, memory in enumerate(found):
            memory["stored"] = StoredShard(store, index)
    return [
        ShardMemory(**memory, updates_on_host=is_there, grad_rests=offload.grads == "cpu" and is_there)
        for memory, is_there in zip(found, on_host, strict=True)
    ]


_WHAT = {"own": "parameters", "master": "master weights", "grad": "gradients"}
