"""``partition="profile"``: stages by what layers take, not by how many they are or how large."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from pipeline.models import MODELS, Data, loss_fn
from pipeline.twin import Recipe, assert_follows, train, train_alone
from shardcore import plan
from shardcore.deepspeed.pipe import PipelineModule
from shardcore.pipeline import LayerSpec, Pipeline
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise


class Slow(nn.Module):
    """A small layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, later."""
        time.sleep(self.seconds)
        self.calls += 1
        found: torch.Tensor = self.lin(x)
        return found


TIMES = [0.12, 0.01, 0.01, 0.01, 0.01, 0.01]


@spmd(world=2)
def test_stages_take_equally_long() -> None:
    """One slow layer against five: both other methods would give each rank three layers."""
    mesh = sc.Mesh(pp=2)
    layers = [LayerSpec(Slow, seconds) for seconds in TIMES]
    state = torch.random.get_rng_state()
    pipe = Pipeline(layers, mesh, partition="profile", example=torch.ones(2, 4), loss_fn=F.mse_loss)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert pipe.placement.boundaries == [0, 1, 6]
    found = pipe.layer_seconds
    assert found is not None
    assert all(each >= wanted for each, wanted in zip(found, TIMES, strict=True))
    assert len({str(each) for each in sc.comm.exchange(found, mesh["pp"], "seconds")}) == 1
    assert f"ms of layers: {1e3 * found[0]:.3f}, " in pipe.explain()
    assert {p.requires_grad for p in pipe.parameters()} == {True}
    assert all(p.grad is None for p in pipe.parameters())
    assert len(list(pipe.children())) == (1 if mesh.rank == 0 else 5)


@spmd(world=2)
def test_modules_are_left_as_they_were() -> None:
    mesh = sc.Mesh(pp=2)
    torch.manual_seed(1)
    model = nn.Sequential(Slow(0.0), nn.BatchNorm1d(4), Slow(0.0), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Pipeline(model, mesh, partition="profile", example=torch.randn(8, 4), loss_fn=F.mse_loss)
    assert_bitwise(dict(model.state_dict()), before)


@pytest.mark.parametrize("model", ["tied", "skipping", "dropping"])
@spmd(world=4)
def test_it_trains_as_any_other(model: str) -> None:
    """Over dicts, skips, tied weights, dropout; on a V, at stage 1."""
    example, _ = Data().batch(0, 0)
    recipe = Recipe(
        model=model, schedule="zb-v", stage=1, clip=0.5, steps=3, options={"partition": "profile", "example": example}
    )
    plain = Recipe(model=model, clip=0.5, steps=3)
    assert_follows(train(recipe, sc.Mesh(pp=2)), train_alone(plain, world=2))


@spmd(world=1)
def test_deepspeeds_name_for_it() -> None:
    example, _ = Data().batch(0, 0)
    pipe = PipelineModule(MODELS["tied"](), 1, loss_fn=loss_fn, partition_method="profile", example=example)
    assert pipe.layer_seconds is not None
    assert pipe.placement.boundaries == plan.partition_layers(pipe.layer_seconds, 1)
