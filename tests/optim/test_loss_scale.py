"""The fp16 loss scale: its sequence for fixed overflow patterns, and what a skipped step leaves untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import StateError
from shardcore.optim import ConstantScale, DynamicScale
from shardcore.testing import spmd

TABLE = [
    # (options, overflow per step, scale after each step)
    ({"window": 2, "hysteresis": 1}, "....", [64, 128, 128, 256]),
    ({"window": 2, "hysteresis": 1}, "x.x.", [32, 32, 16, 16]),
    ({"window": 2, "hysteresis": 1}, ".x..", [64, 32, 32, 64]),
    ({"window": 3, "hysteresis": 2}, "xx.xx", [64, 32, 32, 16, 8]),
    ({"window": 2, "hysteresis": 2}, "x..x.", [64, 64, 128, 128, 128]),
    ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [64, 64, 64, 64, 64, 32]),
    ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": False}, "x.x.x", [64, 64, 32, 32, 16]),
    ({"window": 9, "hysteresis": 1, "minimum": 24.0}, "xx", [32, 24]),
]


@pytest.mark.parametrize(("options", "pattern", "expected"), TABLE)
def test_dynamic_scale_follows_the_table(options: dict[str, Any], pattern: str, expected: list[float]) -> None:
    scale = DynamicScale(scale=64.0, **options)
    found = []
    for step in pattern:
        scale.update(overflow=step == "x")
        found.append(scale.scale)
    assert found == expected


def test_defaults_are_those_of_the_field() -> None:
    scale = DynamicScale()
    assert (scale.scale, scale.window, scale.hysteresis, scale.minimum) == (65536.0, 1000, 2, 1.0)


def test_overflow_at_the_minimum_is_an_error() -> None:
    scale = DynamicScale(scale=2.0, hysteresis=1)
    scale.update(overflow=True)
    with pytest.raises(StateError, match="at its minimum 1"):
        scale.update(overflow=True)


def test_a_constant_scale_stays() -> None:
    scale = ConstantScale(128.0)
    for overflow in (True, False, True):
        scale.update(overflow=overflow)
    assert scale.scale == 128.0


@spmd(world=2)
def test_a_16_bit_model_that_is_never_finite_is_an_error_on_all_ranks() -> None:
    model = sc.shard(Scaled(), stage=2, precision=sc.Precision(param="bf16"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(49):
        model(math.inf).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(math.inf).backward()
    with pytest.raises(StateError, match=r"step 50: gradients were not finite in 50 steps in a row"):
        optimizer.step()


def test_state_survives_a_checkpoint() -> None:
    scale = DynamicScale(scale=64.0, window=3, hysteresis=2)
    for overflow in (True, False, False):
        scale.update(overflow=overflow)
    other = DynamicScale(scale=64.0, window=3, hysteresis=2)
    other.load_state_dict(scale.state_dict())
    for overflow in (False, True, True):
        scale.update(overflow=overflow)
        other.update(overflow=overflow)
        assert other.scale == scale.scale


class Scaled(nn.Module):
    """Its gradient is ``factor`` in each element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40))

    def forward(self, factor: float) -> torch.Tensor:
        return self.weight.sum() * factor


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_all_ranks_skip_together_and_nothing_moves(stage: int) -> None:
    mesh = sc.Mesh()
    model = sc.shard(Scaled(), mesh, stage=stage, precision=sc.Precision(param="fp16"))
    scale = DynamicScale(scale=64.0, window=2, hysteresis=1)
    optimizer = sc.optimizer(torch.optim.Adam, model, lr=0.1, loss_scale=scale)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def state() -> list[Any]:
        moments = [value.clone() for each in optimizer.inner.state.values() for value in each.values()]
        return [sc.local_shard(model.weight)[0].clone(), *moments]

    scales = []
    for step, overflow in enumerate("..x.x.."):
        before = state()
        model(math.inf if overflow == "x" and mesh.rank == step % 2 else 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
        if overflow == "x":
            assert not optimizer.step_was_applied
            assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        else:
            assert optimizer.step_was_applied
            schedule.step()
        scales.append(scale.scale)
    assert scales == [64, 128, 64, 64, 32, 32, 64]
    assert (optimizer.num_steps, optimizer.num_skipped_steps) == (5, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_a_static_scale_of_128_trains_as_without(stage: int) -> None:
    found = []
    for scale in (128.0, 1.0):
        model = sc.shard(Scaled(), stage=stage, precision=sc.Precision(param="fp16", loss_scale=scale))
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.25)
        for _ in range(3):
            model(0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.loss_scale.scale == scale
        model(math.inf).backward()
        optimizer.step()
        assert not optimizer.step_was_applied
        assert optimizer.loss_scale.scale == scale
        found.append(sc.local_shard(model.weight)[0].tolist())
    assert found[0] == found[1]
    assert set(found[0]) <= {1 - 3 * 0.125}


@spmd(world=2)
def test_n1_a_model_that_always_overflows_is_an_error_on_all_ranks() -> None:
    model = sc.shard(Scaled(), stage=2, precision=sc.Precision(param="fp16"))
    scale = DynamicScale(scale=2.0, hysteresis=1)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1, loss_scale=scale)
    model(math.inf).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(math.inf).backward()
    with pytest.raises(StateError, match=r"step 2: gradients overflow although .* minimum"):
        optimizer.step()
