"""One training loop played twice: on a sharded model by each rank, and on a plain one for all ranks in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardcore as sc
from zero.twin import largest_difference, whole_parameters

Play = Callable[[nn.Module, int, int], None]
"""``play(model, step, rank)``: forwards and backwards of one step on this rank's data; no update."""


def seeded(build: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """The model that ``build`` makes under a fixed seed."""
    torch.manual_seed(seed)
    return build()


def rows(step: int, rank: int, *shape: int) -> torch.Tensor:
    """Normal values that depend on step and rank alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def reference(build: Callable[[], nn.Module], play: Play, world: int, steps: int, **options: Any) -> nn.Module:
    """The plain loop: gradients of all ranks' parts, averaged."""
    model = seeded(build)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)
    for step in range(steps):
        for rank in range(world):
            play(model, step, rank)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_follows(
    build: Callable[[], nn.Module],
    play: Play,
    *,
    stage: int,
    reference_play: Play | None = None,
    units: Any = "auto",
    budget: int | None = None,
    steps: int = 3,
    tolerance: float = 1e-6,
    between: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Train a sharded model by ``play`` and compare it with the reference. Returns the sharded model. Collective.

    Args:
        reference_play: what the reference does instead, where it must give the same gradients by other means.
        between: done to the sharded model after each step; must not change what it learns.
    """
    mesh = sc.Mesh(device="cpu")
    model = sc.shard(seeded(build), mesh, stage=stage, units=units, budget=budget)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    for step in range(steps):
        play(model, step, mesh.data_rank)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model)
    alone = reference(build, reference_play or play, mesh.data_world, steps, momentum=0.9)
    expected = {name: param.detach() for name, param in alone.named_parameters()}
    difference, where = largest_difference(whole_parameters(model), expected)
    assert difference <= tolerance, f"stage {stage}: {where} is off by {difference:g}"
    return model
