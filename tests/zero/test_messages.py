"""What common mistakes with a sharded model are told: the way that leads on, not only what went wrong."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import CheckpointError, ConfigError, StateError
from shardcore.testing import spmd


@spmd(world=2)
def test_moves_and_casts_belong_before_shard() -> None:
    model = sc.shard(nn.Linear(4, 4), stage=3)
    for move in (model.cpu, model.half, model.bfloat16, model.double, lambda: model.to("meta")):
        with pytest.raises(StateError, match=r"move the model before shardcore\.shard"):
            move()
    with pytest.raises(StateError, match="was used by 'data'"):
        model.weight.data  # noqa: B018


@spmd(world=2)
def test_a_pickled_model_is_refused_with_what_to_save() -> None:
    for stage in (0, 3):
        model = sc.shard(nn.Linear(4, 4), stage=stage)
        with pytest.raises(StateError, match=r"shardcore\.state_dict\(model\)"):
            torch.save(model, io.BytesIO())
    with pytest.raises(StateError, match=r"shardcore\.state_dict\(model\)"):
        pickle.dumps(model.weight)


@spmd(world=2)
def test_a_grad_scaler_is_pointed_to_the_precision() -> None:
    for stage in (2, 3):
        model = sc.shard(nn.Linear(4, 4), stage=stage)
        optimizer = sc.optimizer("sgd", model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        with pytest.raises(StateError, match='precision="fp16"'):
            scaler.step(optimizer)


@spmd(world=2)
def test_devices_that_are_not_there_are_named() -> None:
    sc.Mesh()
    for device in ("gpu", "meta", *(() if torch.cuda.is_available() else ("cuda", "cuda:1"))):
        with pytest.raises(ConfigError, match=rf"Mesh\(device='{device}'\)"):
            sc.Mesh(device=device)


@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=2)
def test_a_resize_after_sharding_is_refused_and_the_model_trains_on(stage: int) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.embed(tokens) @ self.embed.weight.T

    model = sc.shard(Language(), stage=stage)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    before = sc.state_dict(model, rank0_only=False)["embed.weight"]
    for num_rows in (8, 5, 6):
        text = rf"'embed\.weight' was resized .* \(6, 4\) to \({num_rows}, 3\).*Resize before shardcore\.shard"
        with pytest.raises(StateError, match=text), sc.summon(model, writeback=True):
            model.embed.weight.data = torch.ones(num_rows, 3)
        assert model.embed.weight.shape == (6, 4)
    assert torch.equal(sc.state_dict(model, rank0_only=False)["embed.weight"], before)
    for _ in range(2):
        model(torch.tensor([[0, 5]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(sc.state_dict(model, rank0_only=False)["embed.weight"], before)


@spmd(world=2)
def test_a_part_of_a_sharded_model_is_no_model() -> None:
    model = sc.shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1)), stage=3)
    calls = {
        "summon": lambda part: sc.summon(part).__enter__(),
        "state_dict": sc.state_dict,
        "optimizer": lambda part: sc.optimizer("sgd", part, lr=0.1),
        "checkpoint": lambda part: sc.checkpoint.save("nowhere", part),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=r"Sequential is a part of a sharded Sequential.*give the whole model"):
            call(model[0])
        with pytest.raises(ConfigError, match="Linear is not sharded"):
            call(nn.Linear(4, 4)), name


@spmd(world=1)
def test_an_init_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shard\(init=5\): expected a function of a module"):
        sc.shard(nn.Linear(4, 4), init=5)


@spmd(world=2)
def test_parameters_that_no_optimizer_can_take_are_told_apart() -> None:
    model = sc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), stage=2)
    with pytest.raises(
        ConfigError, match=r"^2 parameters are in the optimizer more than once \('0.weight', '0.bias'\)"
    ):
        sc.optimizer("sgd", [{"params": model.parameters()}, {"params": model[0].parameters()}], lr=0.1)
    with pytest.raises(ConfigError, match=r"shapes \(1, 4\), \(1,\)\)\. Pass the parameters of a model that"):
        sc.optimizer("sgd", nn.Linear(4, 1).parameters(), lr=0.1)
    model.append(nn.Linear(1, 1))
    for targets in (model, list(model.parameters())):
        with pytest.raises(
            ConfigError, match=r"^2 of .* 6 parameters \('2.weight', '2.bias'\) .* cannot be sharded later"
        ):
            sc.optimizer("sgd", targets, lr=0.1)


@spmd(world=1)
def test_options_that_an_optimizer_does_not_have_are_named_with_the_nearest() -> None:
    model = sc.shard(nn.Linear(4, 4), stage=2)
    for algorithm in ("adamw", torch.optim.AdamW):
        with pytest.raises(ConfigError, match=r"optimizer AdamW: no option 'learning_rate'; did you mean 'lr'\?"):
            sc.optimizer(algorithm, model, learning_rate=1)
    with pytest.raises(
        ConfigError, match=r"no option 'wieght_decay'; did you mean 'weight_decay'\?; no option 'zzz'; it"
    ):
        sc.optimizer(torch.optim.Adam, model, lr=1, wieght_decay=0, zzz=1)
    sc.optimizer(lambda groups, **options: torch.optim.SGD(groups, **options), model, lr=0.1)


@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=2)
def test_model_parameters_of_another_model_are_refused_before_anything_is_sharded(stage: int) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    text = r"model_parameters=...\): 2 of \d parameters .* are not those of model=: pass"
    forms = (
        other.parameters(),
        other.named_parameters(),
        [{"params": other.parameters()}],
        [{"params": list(model.parameters())}, {"params": list(other.parameters())}],
    )
    for given in forms:
        with pytest.raises(ConfigError, match=text):
            sc.initialize(model=model, model_parameters=given, config=config)
    groups = [{"params": model.weight}, {"params": (p for p in [model.bias])}]
    engine, *_ = sc.initialize(model=model, model_parameters=groups, config=config)
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()


@spmd(world=2)
def test_what_is_no_model_or_no_state_is_told(tmp_path: Path) -> None:
    model = sc.shard(nn.Linear(4, 4), stage=2)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        r"checkpoint\.save: expected the model .*, got str": lambda: sc.checkpoint.save(model, "folder"),
        r"checkpoint\.load: expected the model .*, got str": lambda: sc.checkpoint.load(model, "folder"),
        "expected the model .*, got ShardedOptimizer": lambda: sc.checkpoint.save(tmp_path, optimizer),
        "expected the model .*, got str": lambda: sc.state_dict("model"),
    }
    for message, call in calls.items():
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(CheckpointError, match="expected a dict of tensors by name, got NoneType"):
        sc.load_state_dict(model, None)


class Aliased(nn.Module):
    """Holds the memory of a parameter once more."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if how == "buffer":
            self.register_buffer("first", self.linear.weight.detach()[:1])
        elif how == "attribute":
            self.first = self.linear.weight.detach()[:1]
        else:
            self.linear = nn.utils.spectral_norm(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 4] to the same."""
        return self.linear(x)


@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=2)
def test_memory_that_is_shared_with_a_parameter_is_named(stage: int) -> None:
    """It would hold old values from the first step on."""
    for how in ("buffer", "attribute"):
        with pytest.raises(ConfigError, match=rf"{how} 'first' shares the memory of parameter 'linear\.weight'"):
            sc.shard(Aliased(how), stage=stage)
    sc.shard(Aliased("norm"), stage=stage)(torch.ones(2, 4))
