"""When communication happens: reductions during backward, gathers of updated parameters until their first use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore import comm
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import rows
from zero.models import Block


def model_with_events(stage: int) -> tuple[nn.Module, list[str]]:
    """Four blocks; each notes when its backward begins, each group when its reduction starts."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    events: list[str] = []
    sc.shard(model, stage=stage)
    for name, block in model.named_children():
        block.register_full_backward_pre_hook(lambda module, grads, name=name: events.append(f"backward {name}"))
    root: Any = find_root(model)
    for group in root.groups:
        start = group.grads.start_reduce

        def noted(group: Any = group, start: Any = start) -> None:
            events.append(f"reduce {group.name.split('#')[0]}")
            start()

        group.grads.start_reduce = noted
    return model, events


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_a_units_reduction_starts_while_earlier_units_are_still_to_come(stage: int) -> None:
    model, events = model_with_events(stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for step in range(2):  # stage 1 learns from the first window which backward is the last
        events.clear()
        model(rows(step, 0, 4, 7).requires_grad_()).mean().backward()
        during = list(events)
        optimizer.step()
        optimizer.zero_grad()
    assert during.index("reduce 3") < during.index("backward 1")
    assert during.index("reduce 2") < during.index("backward 0")
    assert [event for event in during if event.startswith("reduce")] == [f"reduce {i}" for i in (3, 2, 1, 0)]
    assert events == during, "step() had nothing left to reduce"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@spmd(world=[2, 4])
def test_gradients_travel_as_a_reduce_scatter(stage: int, accumulation: int, world: int) -> None:
    """(W-1)/W of the gradient bytes per reduction; stage 1 reduces once a window, the others in each backward."""
    model = sc.shard(nn.Sequential(*(Block() for _ in range(4))), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    root: Any = find_root(model)
    padded = sum(group.full.numel() for group in root.groups)
    for step in range(2):
        comm.reset_traffic()
        for micro in range(accumulation):
            model(rows(step, micro, 4, 7)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times = 1 if stage == 1 else accumulation
        assert comm.traffic()["reduce"] == times * padded * 4 * (world - 1) // world
        control = sum(len(group.slots) + 1 for group in root.groups) + 8
        assert comm.traffic()["all-reduce"] == 2 * control // world * (world - 1), "flags alone are all-reduced"


@pytest.mark.parametrize("stage", [1, 2])
@spmd(world=2)
def test_updated_parameters_are_waited_for_at_their_first_use(stage: int) -> None:
    model = sc.shard(nn.Sequential(*(Block() for _ in range(4))), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    root: Any = find_root(model)
    seen: list[list[str]] = []
    for block in model:
        block.register_forward_pre_hook(lambda m, args: seen.append([group.state.value for group in root.groups]))
    model(rows(0, 0, 4, 7)).mean().backward()
    optimizer.step()
    assert {group.state.value for group in root.groups} == {"unsharding"}
    seen.clear()
    model(rows(1, 0, 4, 7))
    for i, states in enumerate(seen):
        assert states == ["unsharded"] * (i + 1) + ["unsharding"] * (3 - i)
