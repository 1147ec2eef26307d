"""``zero.Init`` by DeepSpeed's names: with the engine, without an explicit start of the job, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.errors import ConfigError, StateError
from shardcore.testing import run_spmd, spmd
from zero.built import Plain, assert_equal
from zero.twin import whole_parameters

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {"stage": stage}, **more}


def check_before_the_job_has_started() -> None:
    settings = config(3)
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings)
    assert engine.world_size == 2
    torch.manual_seed(1)
    assert_equal(engine.module, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))


def test_a2_the_world_is_known_without_an_explicit_start() -> None:
    run_spmd(check_before_the_job_has_started, 2, init=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_u10_the_engine_takes_the_model_at_every_stage(stage: int) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(3)
        with deepspeed.zero.Init(enabled=enabled):
            model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
        engine, _, _, _ = deepspeed.initialize(model=model, config=config(stage))
        for _ in range(2):
            engine.backward(engine(torch.ones(8, 4)).mean())
            engine.step()
        results.append(whole_parameters(engine.module))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@spmd(world=2)
def test_edits_of_one_rank_before_the_engine_exists() -> None:
    with deepspeed.zero.Init():
        model = nn.Linear(3, 3)
    with deepspeed.zero.GatheredParameters(model.weight, modifier_rank=1), torch.no_grad():
        if sc.Mesh().rank == 1:
            model.weight.fill_(4)
    with deepspeed.zero.GatheredParameters(model):
        assert model.weight.unique().tolist() == [4.0]
    with pytest.raises(StateError, match=r"Linear\.bias"), deepspeed.zero.GatheredParameters(model.bias):
        nn.init.ones_(model.bias)
    sc.shard(model)
    assert whole_parameters(model)["weight"].unique().tolist() == [4.0]


@spmd(world=2)
def test_c10_embeddings_grow_within_the_gather_context() -> None:
    def grow(model: nn.Module) -> None:
        old = model.embed.weight
        with deepspeed.zero.GatheredParameters(old, modifier_rank=0):
            new = nn.Embedding(20, 8)
            new.weight.data[:17] = old.data
            new.weight.data[17:] = 0.5
        model.embed = new
        model.head.weight = new.weight
        model.head.bias = nn.Parameter(torch.zeros(20))

    models = []
    for enabled in (False, True):
        torch.manual_seed(2)
        with deepspeed.zero.Init(enabled=enabled):
            model = Plain()
        grow(model)
        sc.shard(model)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        for _ in range(2):
            model(torch.arange(16).view(2, 8) + 4).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.head.weight is model.embed.weight
        models.append(whole_parameters(model))
    assert models[1]["embed.weight"].shape == (20, 8)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@spmd(world=2)
def test_a_model_that_exists_and_a_dtype() -> None:
    model = nn.Linear(6, 6)
    expected = model.weight.detach().bfloat16()
    deepspeed.zero.Init(module=model, dtype=torch.bfloat16)
    sc.shard(model)
    assert torch.equal(whole_parameters(model)["weight"], expected)


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match=r"mpu is not supported.*zero_quantized_weights.*remote_device='nvme'"):
        deepspeed.zero.Init(mpu=object(), zero_quantized_weights=True, remote_device="nvme")
    with pytest.raises(ConfigError, match="give one of them"):
        deepspeed.zero.Init(config=CONFIG, config_dict_or_path=CONFIG)
    with deepspeed.zero.Init(None, None, None, True, "cpu", False, CONFIG):
        nn.Linear(2, 2)
