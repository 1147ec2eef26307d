"""States that move to the host and come back: exact, and refused meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from engine.loops import batches, config
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd, zoo
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
STATES = ["lp_params", "hp_params", "optim_states", "lp_grads", "contiguous_grad_buffer"]


def make(stage: int, **more: Any) -> sc.Engine:
    engine, _, _, _ = sc.initialize(model=zoo.build("mlp"), config=config(stage, 2, **more))
    return engine


def train(engine: sc.Engine, micro_batches: range) -> None:
    for index in micro_batches:
        engine.backward(zoo.loss(engine, batches("mlp", engine.mesh, index, 1)[0]))
        engine.step()


def held_nbytes(engine: sc.Engine) -> dict[str, int]:
    """Bytes of storages that hold each state on this rank."""
    root: Any = find_root(engine.module)
    trainable = [group for group in root.groups if group.trainable]
    tensors = {
        "lp_params": [group.own if group.releases else group.full for group in root.groups],
        "hp_params": [group.master for group in trainable if group.master is not group.own],
        "optim_states": engine.optimizer.states() if engine.optimizer is not None else [],
        "grads": [buffer for g in trainable for whole in (True, False) for buffer in g.grads.buffers(whole=whole)],
    }
    return {
        name: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())
        for name, found in tensors.items()
    }


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_there_and_back_in_mid_window_is_exact(stage: int, precision: str) -> None:
    more = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    straight, moved = make(stage, **more), make(stage, **more)
    train(straight, range(7))
    train(moved, range(3))
    moved.offload_states()  # finishes the reduction under way
    moved.reload_states()
    before, values = held_nbytes(moved), whole_parameters(moved.module)
    assert before["lp_params"] > 0
    assert (before["hp_params"] > 0) == (precision == "bf16")
    for include in (None, ["optim_states"], ["lp_params", "lp_grads"], ["hp_params", "contiguous_grad_buffer"]):
        moved.offload_states(include=include, pin_memory=False)
        moved.offload_states(include=include)  # again: nothing is left to move
        after = held_nbytes(moved)
        for name in STATES[:3]:
            assert after[name] == (0 if include is None or name in include else before[name]), (include, name)
        assert include is not None or after["grads"] == 0
        moved.reload_states()
        moved.reload_states()
        found = held_nbytes(moved)
        assert found == before
        assert all(torch.equal(value, values[name]) for name, value in whole_parameters(moved.module).items())
    train(moved, range(3, 7))
    for name, value in whole_parameters(straight.module).items():
        assert torch.equal(value, whole_parameters(moved.module)[name]), name


@all_stages
@spmd(world=2)
def test_what_needs_a_state_that_is_away_says_so(stage: int) -> None:
    engine = make(stage)
    train(engine, range(3))
    module, optimizer = engine.module, engine.optimizer
    assert optimizer is not None
    x = torch.ones(4, 6)
    weight = module[0].weight
    uses: list[Callable[[], object]] = [
        lambda: train(engine, range(1)),
        lambda: module[0](batches("mlp", engine.mesh, 0, 1)[0]["x"]),
        lambda: module.state_dict(),
        lambda: sc.state_dict(module),
        lambda: sc.local_shard(weight),
        lambda: whole_parameters(module),
        lambda: module.load_state_dict({}),
        lambda: sc.load_state_dict(module, {}),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: sc.zero.full_master(weight),
        lambda: sc.zero.full_grad(weight),
        lambda: sc.zero.local_grad(weight),
        lambda: sc.optim.full_state(weight, "exp_avg"),
        lambda: optimizer.state_dict(),
        lambda: optimizer.step(),
        lambda: x @ weight.T,
    ]
    engine.offload_states()
    if stage == 0:
        assert weight.grad is None
    else:
        uses.append(lambda: setattr(weight, "grad", None))
    for use in uses:
        with pytest.raises(StateError, match=r"reload_states\(\)"):
            use()
    assert weight.shape == module[0].weight.shape
    engine.reload_states()
    assert (weight.grad is not None) == (stage == 0)
    train(engine, range(3, 4))
    assert engine.global_steps == 2


@all_stages
@spmd(world=2)
def test_generation_while_the_rest_is_away(stage: int) -> None:
    engine = make(stage, bf16={"enabled": True})
    train(engine, range(2))
    inputs = batches("mlp", engine.mesh, 0, 1)[0]
    with torch.no_grad():
        expected = zoo.loss(engine, inputs)
    engine.offload_states(include=["optim_states", "hp_params", "contiguous_grad_buffer", "lp_grads"])
    with torch.no_grad():
        assert torch.equal(zoo.loss(engine, inputs), expected)
    with pytest.raises(StateError, match=r"backward needs .*reload_states"):
        zoo.loss(engine, inputs).backward()
    engine.reload_states()
    engine.reset_iteration()
    train(engine, range(2, 4))


@spmd(world=2)
def test_arguments() -> None:
    engine = make(2)
    with pytest.raises(ValueError, match="nvme"):
        engine.offload_states(device="nvme")
    with pytest.raises(ConfigError, match=r"'optim_state'.*did you mean 'optim_states'"):
        engine.offload_states(include=["optim_state"])
    with sc.summon(engine.module), pytest.raises(StateError, match="summon"):
        engine.offload_states()
    model = sc.shard(nn.Linear(4, 3), stage=1)
    sc.zero.offload_states(model)
    with pytest.raises(StateError, match="reload_states"):
        model(torch.ones(1, 4))
    sc.zero.reload_states(model)
    assert model(torch.ones(1, 4)).shape == (1, 3)


@all_stages
@spmd(world=2)
def test_the_end_of_an_engine(stage: int) -> None:
    engine = make(stage)
    train(engine, range(3))
    engine.empty_partition_cache()
    values = whole_parameters(engine.module)
    engine.destroy()
    engine.destroy()
    assert held_nbytes(engine)["optim_states"] == held_nbytes(engine)["grads"] == 0
    for use in (lambda: train(engine, range(1)), engine.step):
        with pytest.raises(StateError):
            use()
    assert all(torch.equal(value, values[name]) for name, value in whole_parameters(engine.module).items())
