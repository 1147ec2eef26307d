"""The configuration's ``tensor_parallel`` splits an ordinary model, and the engine trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardcore as sc
from shardcore.errors import ConfigError
from shardcore.testing import spmd
from tensor.following import STEPS, full_batch, rows, train_whole
from tensor.hugging_face import build, loss


def configuration(**changes: Any) -> dict[str, Any]:
    """Two micro-batches of one row a step on each of two data-parallel ranks."""
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2},
        "tensor_parallel": {"tp_size": 2},
        **changes,
    }


@spmd(world=4, timeout=110)
def test_tp_size_from_the_file() -> None:
    losses, norms, whole = train_whole("gpt2", 0.5)
    engine, *_ = sc.initialize(model=build("gpt2"), config=configuration())
    assert (engine.mesh["tp"].size, engine.mesh.data_world) == (2, 2)
    assert engine.train_micro_batch_size_per_gpu() == 1
    for step in range(STEPS):
        mine = rows(full_batch(step), engine.mesh.data_rank, 2)
        total = 0.0
        for part in range(2):
            value = loss(engine, rows(mine, part, 2))
            engine.backward(value)
            engine.step()
            total += float(value.detach()) / 2
        mean = sc.comm.sum_over_ranks(torch.tensor(total), engine.mesh["dp"], "loss") / 2
        assert float(mean) == pytest.approx(losses[step], rel=1e-6)
        assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-9)
    for name, value in sc.state_dict(engine.module, rank0_only=False).items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-8, atol=1e-8)


@spmd(world=4, timeout=110)
def test_experts_of_a_mesh_that_is_given() -> None:
    losses, norms, _ = train_whole("mixtral", 0.5)
    config = configuration(gradient_accumulation_steps=1, tensor_parallel={"tp_size": 1})
    engine, *_ = sc.initialize(model=build("mixtral"), config=config, mesh_param=sc.Mesh(ep=2))
    assert engine.module.model.layers[0].mlp.experts.down_proj.shape[0] == 2
    for step in range(STEPS):
        value = loss(engine, rows(full_batch(step), engine.mesh.data_rank, 4))
        engine.backward(value)
        engine.step()
        mean = sc.comm.sum_over_ranks(value.detach().clone(), engine.mesh["dp"], "loss") / 4
        assert float(mean) == pytest.approx(losses[step], rel=1e-6)
        assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-6)


@spmd(world=4, timeout=110)
def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel.tp_size: 3 does not divide the 4 ranks.*\[1, 2, 4\]"):
        sc.initialize(model=build("gpt2"), config=configuration(tensor_parallel={"tp_size": 3}))
    with pytest.raises(ConfigError, match="the mesh that was given has 1 tensor-parallel ranks"):
        sc.initialize(model=build("gpt2"), config=configuration(), mesh_param=sc.Mesh())
    mesh = sc.Mesh(tp=2)
    model = sc.tensor.parallelize(build("gpt2"), mesh)
    engine, *_ = sc.initialize(model=model, config=configuration(), mesh_param=mesh)
    assert engine.mesh is mesh
