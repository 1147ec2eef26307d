"""What plain training does silently right and a sharded one could do silently wrong: it is the same, or an error."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Block

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Clamped(nn.Module):
    """A block that keeps its weights small by writing to them in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x).tanh()


def play_square(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 7)).square().mean().backward()


@all_stages
@spmd(world=2)
def test_writes_of_a_forward_to_its_parameters_last(stage: int) -> None:
    check_follows(lambda: nn.Sequential(Clamped(), Clamped()), play_square, stage=stage, units=[Clamped])


class Momentum(nn.Module):
    """A model whose forward lets one part follow the other, by ``.data``, and compares them (MoCo, He et al. 2020)."""

    follows, replaces = True, False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Block(7), Block(7).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.follows:
            self.follow()
        return self.query(x) * self.key(x)

    def follow(self) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            if self.replaces:
                ours.data = ours.data * 0.9 + theirs.data * 0.1
            else:
                ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)


@all_stages
@spmd(world=2)
def test_what_a_forward_writes_to_other_units_by_data_lasts(stage: int) -> None:
    def play_once(model: nn.Module, step: int, rank: int) -> None:
        model.follows = rank == 0  # the ranks of a job do so once, at the same time
        play_square(model, step, rank)

    check_follows(Momentum, play_square, stage=stage, units=[Block], reference_play=play_once)


@spmd(world=2)
def test_data_replaced_in_a_forward_are_refused_and_the_model_trains_on() -> None:
    """Below stage 3 the step notices it."""
    model = sc.shard(Momentum(), stage=3, units=[Block])
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    model.replaces = True
    with pytest.raises(StateError, match=r"the data of parameter 'key.\S+' were replaced"):
        play_square(model, 0, 0)
    sc.reset_iteration(model)
    model.replaces = False
    play_square(model, 0, 0)
    optimizer.step()


@all_stages
@spmd(world=2)
def test_a_graph_from_before_a_step_is_refused_as_torch_refuses_it(stage: int) -> None:
    model = sc.shard(nn.Sequential(Block(), Block()), stage=stage, units=[Block])
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    old = model(rows(0, 0, 4, 7)).square().mean()
    model(rows(1, 0, 4, 7)).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


@spmd(world=2)
def test_what_would_part_silently_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0' has max_norm=1\.0"):
        sc.shard(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(ConfigError, match=r"'0\.weight' and '1\.weight' share memory"):
        sc.shard(tied)


class DecayOnMatrices(torch.optim.SGD):
    """Decays matrices and leaves vectors alone."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.ndim > 1:
                        param.mul_(0.9)
        super().step()


@spmd(world=1)
def test_an_optimizer_that_looks_at_shapes_is_refused() -> None:
    model = sc.shard(nn.Sequential(nn.Linear(4, 4)), stage=2)
    with pytest.raises(ConfigError, match="DecayOnMatrices treats a matrix"):
        sc.optimizer(DecayOnMatrices, model, lr=0.1)


class TrustRatio(torch.optim.Optimizer):
    """Scales updates by norms of whole parameters, in those groups that ask for it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "adapts": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    ratio = param.norm() / param.grad.norm() if group["adapts"] else 1.0
                    param.add_(param.grad * ratio, alpha=-group["lr"])


@spmd(world=1)
def test_every_group_of_an_optimizer_is_tried() -> None:
    model = sc.shard(nn.Sequential(nn.Linear(4, 4)), stage=2)
    groups = [{"params": [model[0].bias]}, {"params": [model[0].weight], "adapts": True}]
    with pytest.raises(ConfigError, match="TrustRatio is not element-wise"):
        sc.optimizer(TrustRatio, groups)


@spmd(world=2)
def test_an_instance_that_was_taken_over_stays_of_use() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    instance = torch.optim.AdamW(model.parameters(), lr=0.1)
    sc.shard(model, stage=2)
    optimizer = sc.optimizer(instance, model)
    scheduler = torch.optim.lr_scheduler.StepLR(instance, 1, gamma=0.5)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        instance.step()
        scheduler.step()
        instance.zero_grad()
    assert optimizer.num_steps == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    saved = instance.state_dict()
    assert saved["num_steps"] == 2
    instance.load_state_dict(saved)


@spmd(world=2)
def test_an_instance_with_states_from_its_construction_trains() -> None:
    torch.manual_seed(0)
    model, plain = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    twin = torch.optim.Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.5)
    instance = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    sc.shard(model, stage=2)
    sc.optimizer(instance, model)
    for each, optimizer in ((plain, twin), (model, instance)):
        each(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@spmd(world=2)
def test_clearing_the_state_starts_the_moments_anew() -> None:
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    sc.shard(model, stage=1)
    for param in plain.parameters():
        torch.distributed.broadcast(param.data, 0)
    pairs = (
        (plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)),
        (model, sc.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)),
    )
    for each, optimizer in pairs:
        for _ in range(2):
            each(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state.clear()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("stage", [2, 3])
@spmd(world=2)
def test_a_forked_process_cannot_join_the_exchanges(stage: int) -> None:
    model = sc.shard(nn.Sequential(Block(), Block()), stage=stage, units=[Block])
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    play_square(model, 0, 0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            play_square(model, 1, 0)
            optimizer.step()
        except StateError as error:
            os.write(writer, str(error).encode()[:200])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert "forked process" in told.read()
    os.waitpid(child, 0)
    optimizer.step()  # here all is well
