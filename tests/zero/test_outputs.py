"""Hooks that are put on what units and models return: they mean what they mean in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Telling(nn.Module):
    """Returns its hidden state beside what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.up(x)
        return {"loss": self.down(torch.tanh(hidden)).square().mean(), "hidden": hidden}


@STAGES
@spmd(world=[1, 2])
def test_a_hook_on_a_hidden_state_acts_on_the_loss_beside_it(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        out = model(rows(step, rank, 4, 6))
        out["hidden"].register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        out["loss"].backward()

    check_follows(Telling, play, stage=stage)


@STAGES
@spmd(world=2)
def test_retain_grad_of_a_hidden_state(stage: int) -> None:
    def gradient(model: nn.Module) -> Any:
        out = model(rows(0, sc.Mesh().rank, 4, 6))
        out["hidden"].retain_grad()
        (out["loss"] + out["hidden"].mean()).backward()
        return out["hidden"].grad

    expected = gradient(seeded(Telling))
    torch.testing.assert_close(gradient(sc.shard(seeded(Telling), sc.Mesh(device="cpu"), stage=stage)), expected)


class Collecting(nn.Module):
    """A block that hands on all hidden states so far, with its input among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(
        self, x: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return x + torch.tanh(self.linear(x)), (*states, x)


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Collecting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, states = self.stem(x), ()
        for block in self.blocks:
            x, states = block(x, states)
        for state in states:
            state.register_hook(lambda grad: grad * 0.5)
        return x.square().mean() + sum(state.square().mean() for state in states)


@STAGES
@spmd(world=[1, 2])
def test_hooks_on_inputs_that_units_hand_on_mean_the_whole_gradient(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 6)).backward()

    check_follows(Collected, play, stage=stage, units=[Collecting])


class InPlace(nn.Module):
    """A residual block that writes to its input, leaves a note on it and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(self.linear(x * 1.0))
        x.register_hook(lambda grad: grad * 0.5)
        x.num_blocks = getattr(x, "num_blocks", 0) + 1
        return x


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            given, x = x, block(x)
            assert x is given
        assert x.num_blocks == len(self.blocks)
        return x


@STAGES
@spmd(world=[1, 2])
def test_units_that_write_to_their_input_and_hook_it_may_be_stacked(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 6)).square().mean().backward()

    check_follows(Stacked, play, stage=stage, units=[InPlace])


class Passing(nn.Module):
    """Returns its input as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x


@STAGES
@spmd(world=[1, 2])
def test_a_hook_on_an_input_that_the_model_returns_means_the_whole_gradient(stage: int) -> None:
    stem = seeded(lambda: nn.Linear(6, 6))
    head = sc.shard(seeded(Passing), sc.Mesh(device="cpu"), stage=stage)
    alone = seeded(Passing)
    gradients = []
    for model in (alone, head):
        stem.zero_grad()
        x = stem(rows(0, 0, 4, 6))
        out, same = model(x)
        assert same is x
        same.register_hook(lambda grad: -grad)
        out.square().mean().backward()
        gradients.append(stem.weight.grad)
    torch.testing.assert_close(*gradients)


@STAGES
@spmd(world=2)
def test_a_backward_past_the_model_is_none_of_the_model(stage: int) -> None:
    model = sc.shard(seeded(Passing), sc.Mesh(device="cpu"), stage=stage)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    before = sc.state_dict(model, rank0_only=False)
    source = torch.ones(6, requires_grad=True)
    out, same = model(source * rows(0, 0, 4, 6))
    for _ in range(1 + sc.Mesh().rank):
        same.sum().backward(retain_graph=True)
    out.sum().backward()
    optimizer.step()
    after = sc.state_dict(model, rank0_only=False)
    ones = torch.ones(6, 4) @ rows(0, 0, 4, 6)
    torch.testing.assert_close(before["linear.weight"] - after["linear.weight"], 0.1 * ones)
