"""What users do to an optimizer besides stepping it: its states, its groups, its hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd
from zero.following import rows, seeded
from zero.twin import largest_difference, whole_parameters

Optimizer = torch.optim.Optimizer

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: Optimizer, edit: Callable[[Optimizer], None], ranks: list[int]) -> None:
    for step in range(4):
        for rank in ranks:
            (model(rows(step, rank, 2, 4)).square().mean() / len(ranks)).backward()
        if step == 2:
            edit(optimizer)
        optimizer.step()
        optimizer.zero_grad()


def check(stage: int, edit: Callable[[Optimizer], None], *, taken_over: bool) -> None:
    """Training with the edit after two steps follows plain torch."""
    mesh = sc.Mesh(device="cpu")
    model, alone = seeded(two_layers), seeded(two_layers)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.05)
    train(alone, plain, edit, [0, 1])
    ours: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sc.shard(model, mesh, stage=stage)
    sharded = sc.optimizer(ours, model) if taken_over else sc.optimizer("adamw", model, lr=0.05)
    train(model, ours if taken_over else sharded, edit, [mesh.rank])
    difference, where = largest_difference(whole_parameters(model), alone.state_dict())
    assert difference < 1e-6, where


def assign_state(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def clear_state(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def add_hook(optimizer: Optimizer) -> None:
    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    optimizer.register_step_pre_hook(halve)


def replace_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.2}]


@all_stages
@pytest.mark.parametrize(
    ("edit", "taken_over"),
    [
        (clear_state, False),
        *((edit, taken_over) for edit in (assign_state, add_hook, replace_groups) for taken_over in (False, True)),
    ],
)
@spmd(world=2)
def test_an_edit_means_what_it_means_in_torch(stage: int, edit: Callable[[Optimizer], None], taken_over: bool) -> None:
    check(stage, edit, taken_over=taken_over)


@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=2)
def test_state_is_not_asked_by_parameter(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    optimizer = sc.optimizer("adamw", model)
    param = model[0].weight
    for use in (
        lambda: param in optimizer.state,
        lambda: optimizer.state[param],
        lambda: optimizer.state.pop(param, None),
        lambda: optimizer.state.setdefault(param, {}),
        lambda: optimizer.state.update({param: {}}),
    ):
        with pytest.raises(StateError, match="by this rank's pieces"):
            use()
    with pytest.raises(StateError, match="load_state_dict"):
        optimizer.state = {param: {}}
    assert len(optimizer.state) == len(list(optimizer.state))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["removed", "moved", "reversed"])
@spmd(world=2)
def test_groups_keep_their_parameters(stage: int, how: str) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.5}]
    optimizer = sc.optimizer("sgd", groups, lr=0.1)
    model(rows(0, 0, 2, 4)).square().mean().backward()
    if how == "reversed":
        optimizer.param_groups.reverse()
    else:
        moved = optimizer.param_groups[0]["params"].pop()
        if how == "moved":
            optimizer.param_groups[1]["params"].append(moved)
    with pytest.raises(StateError, match="groups cannot be"):
        optimizer.step()


@spmd(world=2)
def test_an_instance_whose_step_was_replaced_is_refused() -> None:
    model = seeded(two_layers)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain.step
    plain.step = lambda *args: step(*args)  # type: ignore[method-assign]
    sc.shard(model, stage=1)
    with pytest.raises(ConfigError, match=r"SGD\.step was replaced"):
        sc.optimizer(plain, model)


@pytest.mark.parametrize("stage", [0, 1, 2])
@spmd(world=2)
def test_views_of_parameters_show_the_step(stage: int) -> None:
    """A kept ``state_dict()`` or ``detach()``, as an average of weights is made of: read at once after the step."""
    model = sc.shard(seeded(lambda: nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))), stage=stage)
    optimizer = sc.optimizer("sgd", model, lr=0.5)
    views = list(model.state_dict().values()) + [param.detach() for param in model.parameters()]
    for step in range(4):
        model(rows(step, 0, 2, 300)).square().mean().backward()
        optimizer.step()
        now = [view.clone() for view in views]
        optimizer.zero_grad()
        for value, param in zip(now, [*model.parameters(), *model.parameters()], strict=True):
            assert torch.equal(value, param.detach())
