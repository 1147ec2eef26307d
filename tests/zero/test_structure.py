"""Layers that come into a sharded model later are neither trained nor averaged: the next step says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import StateError
from shardcore.testing import spmd
from zero.following import rows

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
Edit = Callable[[nn.Module], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.tail = nn.Sequential(nn.Tanh(), nn.Linear(7, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tail(x)  # type: ignore[no-any-return]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(rows(0, 0, 4, 7)).square().mean().backward()
    optimizer.step()


def replace(model: nn.Module) -> None:
    model.tail[1] = nn.Linear(7, 7)  # type: ignore[index, operator]


EDITS: dict[str, tuple[Edit, str]] = {
    "append": (lambda m: m.tail.append(nn.Linear(7, 7)), "tail.2.weight"),  # type: ignore[operator, union-attr]
    "insert": (lambda m: m.layers.insert(1, nn.Linear(7, 7)), "layers.1.weight"),  # type: ignore[operator, union-attr]
    "replace": (replace, "tail.1.weight"),
    "nested": (lambda m: m.tail.append(nn.Sequential(nn.Linear(7, 7))), "tail.2.0.weight"),  # type: ignore[operator, union-attr]
    "parameter": (lambda m: setattr(m.tail[0], "scale", nn.Parameter(torch.ones(1))), "tail.0.scale"),  # type: ignore[index]
}


@pytest.mark.parametrize("edit", EDITS)
@spmd(world=2)
def test_layers_added_after_the_optimizer_are_named(edit: str) -> None:
    change, name = EDITS[edit]
    for stage in range(4):
        model = sc.shard(Net(), stage=stage)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        train_step(model, optimizer)
        change(model)
        with pytest.raises(StateError, match=rf"'{name}'.* put into the model after shardcore\.shard"):
            train_step(model, optimizer)


@spmd(world=2)
def test_a_replaced_parameter_is_named() -> None:
    model = sc.shard(Net(), stage=2)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    train_step(model, optimizer)
    model.tail[1].weight = nn.Parameter(torch.ones(7, 7))  # type: ignore[index]
    with pytest.raises(StateError, match=r"'weight' of shape \(7, 7\) was replaced"):
        train_step(model, optimizer)


@spmd(world=2)
def test_a_torch_optimizer_at_stage_0_is_told_too() -> None:
    model = sc.shard(Net(), stage=0)
    model.tail.append(nn.Linear(7, 7))  # type: ignore[operator, union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"'tail\.2\.weight'"):
        train_step(model, optimizer)


@all_stages
@spmd(world=2)
def test_layers_without_trained_parameters_may_come_and_go(stage: int) -> None:
    model = sc.shard(Net(), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model.tail.append(nn.Dropout(0.0))  # type: ignore[operator, union-attr]
    train_step(model, optimizer)
    del model.tail[2]  # type: ignore[operator, union-attr]
    train_step(model, optimizer)
    model.judge = nn.Linear(7, 1).requires_grad_(False)
    train_step(model, optimizer)
    model.teacher = sc.shard(Net(), stage=stage)  # trained on its own
    train_step(model, optimizer)
    model.judge.requires_grad_(True)
    with pytest.raises(StateError, match=r"'judge\.weight'"):
        train_step(model, optimizer)


@all_stages
@spmd(world=2)
def test_every_rank_hears_of_a_layer_added_on_one(stage: int) -> None:
    mesh = sc.Mesh()
    model = sc.shard(Net(), mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    if mesh.rank == 1:
        model.tail.append(nn.Linear(7, 7))  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match=r"tail\.2\.weight"):
        train_step(model, optimizer)
