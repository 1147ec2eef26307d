"""Real architectures from transformers train as in one process on the joined batch, at every stage and world."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import run_spmd
from zero.architectures import ARCHITECTURES, Architecture
from zero.twin import largest_difference, whole_parameters

STEPS, ROWS = 3, 8
STAGES, WORLDS = (1, 2, 3), (2, 4)
# Sums over rows, tokens and ranks are taken in another order than on the joined batch.
TOLERANCE = 1e-5


def train_alone(architecture: Architecture) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The reference: the joined batch in one process."""
    model = architecture.model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = model(**architecture.batch(step, ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def train_sharded(architecture: Architecture, mesh: sc.Mesh, stage: int) -> tuple[nn.Module, list[float]]:
    model = sc.shard(architecture.model(), mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batch = {k: v.chunk(mesh.data_world)[mesh.data_rank] for k, v in architecture.batch(step, ROWS).items()}
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sc.comm.sum_over_ranks(loss.detach().clone(), mesh["dp"], "test") / mesh.data_world))
    return model, losses


def check(name: str, stages: list[int]) -> None:
    mesh, architecture = sc.Mesh(), ARCHITECTURES[name]
    alone = train_alone(architecture) if mesh.rank == 0 else None
    for stage in stages:
        model, losses = train_sharded(architecture, mesh, stage)
        found = whole_parameters(model)
        if alone is not None:
            difference, where = largest_difference(found, alone[0])
            assert difference <= TOLERANCE, f"{name}, stage {stage}: {where} is off by {difference:g}"
            assert losses == pytest.approx(alone[1], rel=TOLERANCE, abs=TOLERANCE)
            start = dict(architecture.model().named_parameters())
            assert any(not torch.equal(found[key], start[key]) for key in found), "it has learned something"


def sample(name: str) -> int:
    """The stage beside 3 that a run of all tests draws for this architecture."""
    return random.Random(name).choice(STAGES[:2])


@pytest.mark.parametrize(("name", "world"), [(name, WORLDS[i % 2]) for i, name in enumerate(ARCHITECTURES)])
def test_architectures_follow_one_process(name: str, world: int) -> None:
    run_check(name, world, [3, sample(name)])


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_whole_product(name: str, world: int) -> None:
    run_check(name, world, list(STAGES))


def run_check(name: str, world: int, stages: list[int]) -> None:
    run_spmd(check, world, name, stages)
