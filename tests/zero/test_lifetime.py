"""A model that is dropped is freed: nothing global, and no hook, keeps its parameters."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import spmd, tensor_bytes
from zero.models import Block


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=[1, 2])
def test_a_dropped_model_is_freed(stage: int) -> None:
    before = tensor_bytes(collect=True)
    for trains in (False, True):
        model = sc.shard(nn.Sequential(Block(), Block(), nn.Linear(7, 3)), stage=stage)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
        if trains:
            model(torch.ones(2, 7)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        alive = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert alive() is None
        sc.comm.exchange(0, sc.Mesh()["dp"], "test")  # the gather of updated parameters holds them until it has ended
        deadline = time.monotonic() + 5
        while tensor_bytes(collect=True) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tensor_bytes(collect=True) <= before


class Passes(nn.Module):
    """Hands its activations on in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, state: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.inner(state[0])]


class Crossing(nn.Module):
    """A block with two differentiable inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.layer(memory).tanh(), memory


class Crossings(nn.Module):
    """Blocks that read one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x * 2
        for block in self.blocks:
            x, memory = block(x, memory)
        return x


@spmd(world=[1, 2])
def test_a_graph_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for stage in (0, 1, 2, 3):
            model = sc.shard(Crossings(), stage=stage, units=[Crossing])
            optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
            for step in range(4):
                x = torch.ones(2, 7, requires_grad=True)
                alive = weakref.ref(x)
                out = model(x * 1).mean()
                if step != 1:  # a forward without a backward leaves nothing either
                    out.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                del x, out
                assert alive() is None, f"stage {stage}, step {step}"
    finally:
        gc.enable()


@spmd(world=2)
def test_activations_in_containers_are_freed() -> None:
    """A hook in autograd's graph that leads to the activations of its own graph would keep them, step after step."""
    model = sc.shard(nn.Sequential(Passes(), Passes(), Passes()), stage=3)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    alive = []
    for _ in range(2):
        x = torch.ones(2, 7, requires_grad=True)
        (out,) = model([x * 1])
        alive.append(weakref.ref(x))
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, out
    gc.collect()
    assert [each() for each in alive] == [None, None]
