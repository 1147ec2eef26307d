"""An engine's loss scale and 1/accumulation where engines meet, and where the loop scales losses itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardcore as sc
from engine.loops import config
from shardcore.testing import spmd
from zero.following import rows
from zero.twin import largest_difference, whole_parameters

ACCUMULATION = 2


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def engine_of(seed: int, stage: int) -> sc.Engine:
    settings = config(stage, ACCUMULATION)
    del settings["optimizer"], settings["gradient_clipping"]
    return sc.initialize(model=model_of(seed), config=settings, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_one_loss_through_two_engines(stage: int) -> None:
    engines, twins = [engine_of(seed, stage) for seed in (0, 1)], [model_of(seed) for seed in (0, 1)]
    alone = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.1)
    rank, world = engines[0].mesh.rank, engines[0].mesh.world
    for step in range(2 * ACCUMULATION):
        loss = engines[1](engines[0](rows(step, rank, 3, 5))).square().mean()
        if step % 2:
            returned = engines[step // 2].backward(loss)
            assert torch.equal(returned, loss.detach() / ACCUMULATION)
        else:
            loss.backward()
        for engine in engines:
            engine.step()
        for other in range(world):
            output = twins[1](twins[0](rows(step, other, 3, 5)))
            (output.square().mean() / ACCUMULATION / world).backward()
        if step % ACCUMULATION == ACCUMULATION - 1:
            alone.step()
            alone.zero_grad()
    for engine, twin in zip(engines, twins, strict=True):
        expected = {name: p.detach() for name, p in twin.named_parameters()}
        off, where = largest_difference(whole_parameters(engine.module), expected)
        assert off <= 1e-6, f"{where} is off by {off:g}"


@spmd(world=2)
def test_a_loss_that_the_loop_has_scaled_is_not_scaled_again() -> None:
    settings = config(2, 1, fp16={"enabled": True, "loss_scale": 128.0})
    scaled = sc.initialize(model=model_of(0), config=settings)[0]
    plain = sc.initialize(model=model_of(0), config=settings)[0]
    for step in range(2):
        x = rows(step, scaled.mesh.rank, 3, 5)
        loss = scaled.scale(scaled(x).float().square().mean())
        loss.backward()
        plain.backward(plain(x).float().square().mean())
        scaled.step()
        plain.step()
    expected = whole_parameters(plain.module)
    assert all(torch.equal(p, expected[name]) for name, p in whole_parameters(scaled.module).items())
