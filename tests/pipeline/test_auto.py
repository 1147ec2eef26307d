"""``schedule="auto"``: what it measures, what it makes of that, and that training never notices."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from pipeline.models import Data
from pipeline.twin import Recipe, assert_follows, make, parameters, train, train_alone
from shardcore.errors import ConfigError, PlanError
from shardcore.pipeline import AutoSchedule, LayerSpec, Pipeline
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise

SHORT = AutoSchedule(num_profiled_steps=1)
"""Steps 1 and 2 are measured; the switch stands before step 3."""


@pytest.mark.parametrize(("pp", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 1)])
@spmd(world=4)
def test_training_follows_the_reference_over_the_switch(pp: int, stage: int) -> None:
    mesh = sc.Mesh(pp=pp)
    recipe = Recipe(schedule=SHORT, model="dropping", stage=stage, clip=0.5)
    assert_follows(train(recipe, mesh), train_alone(recipe, world=4 // pp))


@spmd(world=2)
def test_the_profile_changes_no_bit() -> None:
    mesh = sc.Mesh(pp=2)
    recipe = Recipe(schedule=SHORT, model="dropping", stage=None, steps=2)
    plain = Recipe(schedule="zb-h1", model="dropping", stage=None, steps=2)
    assert_bitwise(train(recipe, mesh).parameters, train(plain, mesh).parameters)


@spmd(world=2)
def test_another_number_of_micro_batches_is_planned_anew() -> None:
    mesh = sc.Mesh(pp=2)
    pipes = [make(Recipe(schedule=schedule), mesh) for schedule in (SHORT, "zb-h1")]
    for m in (4, 4, 4, 3, 1):
        for pipe, optimizer in pipes:
            pipe.num_microbatches = m
            pipe.train_batch(Data(seed=m).of_rank(0, 1, m, 1), optimizer)
    report = pipes[0][0].auto_report
    assert report is not None
    assert report.predicted_s["auto"] <= report.predicted_s["1f1b"] * (1 + 1e-9)
    tuned, plain = (parameters(pipe) for pipe, _ in pipes)
    for name, value in tuned.items():
        torch.testing.assert_close(value, plain[name], rtol=2e-5, atol=2e-5)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """``x``, later."""
        ctx.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The gradient, as much later."""
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return grad, None


class Sleeper(nn.Module):
    """A linear layer whose forward and input gradient take a given time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        found: torch.Tensor = _Sleep.apply(self.lin(x), self.seconds)
        return found


@spmd(world=2)
def test_predicted_and_measured_times_stand_side_by_side() -> None:
    """A rank that waits for another is not slow itself, and sleeping stages take as long as was foretold."""
    mesh = sc.Mesh(pp=2)
    layers = [LayerSpec(Sleeper, 0.02), LayerSpec(Sleeper, 0.06)]
    pipe = Pipeline(layers, mesh, schedule=SHORT, num_microbatches=4, loss_fn=F.mse_loss, partition=[0, 1, 2])
    data = iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 16)
    assert pipe.auto_report is None
    for _ in range(4):
        pipe.train_batch(data)
    report = pipe.auto_report
    assert report is not None
    for costs in (report.costs.forward, report.costs.input_grad):
        assert 0.02 <= costs[0] < 0.06 <= costs[1]
    assert all(0 < each < 0.02 for each in report.costs.weight_grad)
    assert 0 < report.costs.hop < 0.02
    assert list(report.predicted_s) == ["zb-h1", "auto", "1f1b"]
    assert list(report.measured_s) == ["zb-h1", "auto"]
    for name, measured in report.measured_s.items():
        assert 4 * 0.12 <= measured == pytest.approx(report.predicted_s[name], rel=0.4)
    text = pipe.explain()
    assert f"{1e3 * report.predicted_s['auto']:>14.3f}{1e3 * report.measured_s['auto']:>14.3f}" in text
    assert len(set(sc.comm.exchange(report.predicted_s["auto"], mesh["pp"], "predictions"))) == 1


@pytest.mark.parametrize("stage", [None, 0, 3])
@spmd(world=2)
def test_memory_is_what_layers_keep(stage: int | None) -> None:
    """From F to I the inputs of both layers, from I to W also the gradients of their outputs; no weights."""
    mesh = sc.Mesh(pp=2)
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    pipe = Pipeline(layers, mesh, schedule=SHORT, num_microbatches=2, loss_fn=F.mse_loss)
    if stage is not None:
        sc.shard(pipe, mesh, stage=stage)
    nbytes = 64 * 8 * 4
    for _ in range(3):
        pipe.train_batch(iter([(torch.ones(64, 8), torch.zeros(64, 8))] * 2))
    report = pipe.auto_report
    assert report is not None
    assert report.costs.activation == [2 * nbytes, 4 * nbytes]  # the loss keeps the output and the labels
    assert report.costs.stash == [4 * nbytes, 4 * nbytes]


@spmd(world=2)
def test_less_memory_than_a_micro_batch_takes_is_refused_before_data_are_used() -> None:
    mesh = sc.Mesh(pp=2)
    options = AutoSchedule(num_profiled_steps=1, memory_nbytes=10)
    pipe, optimizer = make(Recipe(schedule=options, m=2), mesh)
    data = Data().of_rank(0, 1, 2, 3)
    for _ in range(2):
        pipe.train_batch(data, optimizer)
    with pytest.raises(PlanError, match="may hold 10"):
        pipe.train_batch(data, optimizer)
    assert len(list(data)) == 2
    sc.comm.clear_failure()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "auto", "num_chunks": 2}, "each rank gets one stage"),
        ({"schedule": "automatic"}, "automatic"),
    ],
)
def test_wrong_arguments(options: dict[str, object], text: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=text):
        Pipeline([nn.Linear(2, 2)], sc.Mesh(), **options)  # type: ignore[arg-type]


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match="num_profiled_steps=0"):
        AutoSchedule(num_profiled_steps=0)
    with pytest.raises(ConfigError, match="memory_nbytes=-1"):
        AutoSchedule(memory_nbytes=-1)
