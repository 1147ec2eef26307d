"""Which shards rest outside the device, and their memory there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardcore.errors import ConfigError
from shardcore.offload import Offload, ShardMemory, ShardSpec, place_shards

if TYPE_CHECKING:
    from shardcore.mesh import Mesh
    from shardcore.zero.planning import Layout
    from shardcore.zero.policy import Policy, Precision
    from shardcore.zero.units import Assignment


def check_offload(offload: Offload | None, policy: Policy) -> None:
    """Raise :class:`ConfigError` for an offload that this stage does not have."""
    if offload is None:
        return
    if not isinstance(offload, Offload):
        raise ConfigError(f"shard(offload={offload!r}): expected shardcore.Offload(...), or None")
    if offload.is_active and not policy.shards_states:
        raise ConfigError(
            f"shard(stage={policy.stage}, offload=...): at stage 0 every rank would keep and update the whole states; "
            "use stage 1, 2 or 3"
        )
    if offload.params is not None and not policy.shards_params:
        raise ConfigError(
            f"shard(stage={policy.stage}, offload=Offload(params={offload.params!r})): parameters are whole on the "
            "device all the time at this stage; use stage 3"
        )


def place(
    offload: Offload | None,
    assignment: Assignment,
    planned: Layout,
    precision: Precision,
    mesh: Mesh,
) -> list[ShardMemory]:
    """Memory outside the device for the shards of all groups. Collective over the data-parallel axis."""
    if offload is None or not offload.is_active:
        return [ShardMemory() for _ in planned.groups]
    specs = []
    for unit_index, layout in planned.groups:
        params = assignment.units[unit_index].params
        dtype = next((params[name].dtype for name, _, _ in layout.entries()), torch.float32)
        master, grad = precision.master_dtype(dtype), precision.sum_dtype(dtype)
        specs.append(
            ShardSpec(numel=layout.shard_numel, param=dtype, master=master, grad=grad, trainable=layout.trainable)
        )
    return place_shards(offload, specs, mesh.device, mesh["dp"])
