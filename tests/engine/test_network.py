"""The configuration's keys for hybrid sharding and cheaper communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from engine import loops
from shardcore.errors import ConfigError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise

ROWS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"mics_shard_size": 2}, {"shard": 2}, {}),
    ({"replicate_size": 2}, {"replicate": 2}, {}),
    ({"replicate_size": 2, "replicate_inside": True}, {"replicate": 2, "replicate_inside": True}, {}),
    ({"mics_shard_size": 4, "mics_hierarchical_params_gather": True}, {}, {"hierarchical": True}),
    ({"zero_hpz_partition_size": 2}, {}, {"secondary": 2}),
    ({"zero_quantized_weights": True, "zero_quantized_gradients": True}, {}, {"gather": "int8", "reduce": "int4"}),
    ({"zero_quantized_nontrainable_weights": True}, {}, {"gather_frozen": "int8"}),
]


@pytest.mark.parametrize(("keys", "grid", "saving"), ROWS)
@spmd(world=4)
def test_a_key_is_its_native_form(keys: dict[str, Any], grid: dict[str, Any], saving: dict[str, Any]) -> None:
    """Through the configuration, on the mesh that it makes itself, and by hand: the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        found = trained({"zero_optimization": {"stage": 3, **keys}}, None)
        mesh = sc.Mesh(**grid, device="cpu")
        model = loops.WithLoss("mlp")
        sc.shard(model, mesh, stage=3, communication=sc.Communication(**saving))
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        for step in range(3):
            for batch in loops.batches("mlp", mesh, step, 1):
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_bitwise(found, shards(model))


def trained(settings: dict[str, Any], mesh: sc.Mesh | None) -> dict[str, torch.Tensor]:
    """This rank's shards after three steps of the engine."""
    model = loops.WithLoss("mlp")
    engine, *_ = sc.initialize(model=model, config={**loops.config(3), **settings}, mesh_param=mesh)
    for step in range(3):
        for batch in loops.batches("mlp", engine.mesh, step, 1):
            engine.backward(engine(batch))
            engine.step()
    return shards(model)


def shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's masters by group; which model of the process it is does not matter."""
    return {group.name.partition(" of model")[0]: group.master.clone() for group in find_root(model).groups}


@spmd(world=4)
def test_sizes_that_do_not_fit_name_their_key() -> None:
    def refusal(mesh: sc.Mesh | None = None, **keys: Any) -> str:
        with pytest.raises(ConfigError) as found:
            sc.initialize(
                model=nn.Linear(3, 3),
                config={**loops.config(3), "zero_optimization": {"stage": 3, **keys}},
                mesh_param=mesh,
            )
        return str(found.value)

    assert "mics_shard_size: 3 does not divide the 4 data-parallel ranks" in refusal(mics_shard_size=3)
    assert "mics_shard_size: 8 does not divide" in refusal(mics_shard_size=8)
    assert "replicate_size: 3 does not divide" in refusal(replicate_size=3)
    assert "zero_hpz_partition_size: 3 does not divide the 4 ranks" in refusal(zero_hpz_partition_size=3)
    assert "does not divide the 2 ranks" in refusal(mics_shard_size=2, zero_hpz_partition_size=4)
    assert "the mesh that was given has 1" in refusal(sc.Mesh(device="cpu"), replicate_size=2)
