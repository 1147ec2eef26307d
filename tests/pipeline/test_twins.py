"""Every schedule against one process: the same losses, norms and parameters; and against each other, to the bit."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext

import pytest
import torch

import shardcore as sc
from pipeline.models import MODELS as MODELS_OF
from pipeline.models import loss_fn
from pipeline.twin import Recipe, Trained, assert_follows, make, parameters, train, train_alone
from shardcore import plan
from shardcore.testing import run_spmd, spmd
from shardcore.testing.twin import assert_bitwise

SCHEDULES = [name for name in plan.schedule_names() if name != "seq-1f1b"]
WORLDS, COUNTS, MODELS = (1, 2, 4), (1, 2, 3, 8), ("tied", "skipping", "dropping")


def recipes(world: int) -> list[Recipe]:
    """Every cell of the product that exists at this number of ranks."""
    cells = itertools.product(SCHEDULES, COUNTS, MODELS)
    return [
        Recipe(schedule=schedule, m=m, model=model, clip=0.5)
        for schedule, m, model in cells
        if schedule != "dualpipe" or (world % 2 == 0 and m % 2 == 0)
    ]


def sample(world: int) -> list[Recipe]:
    """Each schedule once, with its own draw of the rest."""
    draw = random.Random(f"pipeline {world}")
    shuffled = draw.sample(recipes(world), len(recipes(world)))
    return list({each.schedule: each for each in shuffled}.values())


def train_all(some: list[Recipe], pp: int) -> list[Trained]:
    mesh = sc.Mesh(pp=pp)
    return [train(each, mesh) for each in some]


def check(some: list[Recipe], world: int) -> None:
    by_rank = run_spmd(train_all, world, some, world, timeout=110)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        compare(some, by_rank, world)
    finally:
        torch.set_num_threads(threads)


def compare(some: list[Recipe], by_rank: list[list[Trained]], world: int) -> None:
    for i, each in enumerate(some):
        alone = train_alone(each)
        for rank, runs in enumerate(by_rank):
            try:
                assert_follows(runs[i], alone)
            except AssertionError as error:
                raise AssertionError(f"{each} on rank {rank} of {world}: {error}") from None


@pytest.mark.parametrize("world", WORLDS)
def test_schedules_follow_one_process(world: int) -> None:
    check(sample(world), world)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_schedule_follows_one_process(world: int, schedule: str) -> None:
    check([each for each in recipes(world) if each.schedule == schedule], world)


def orders(schedule: plan.PipelineSchedule) -> str:
    """Where stages stand, and in which order each adds up the weight gradients of its micro-batches."""
    weights = [
        (action.stage, action.microbatch)
        for rank in range(schedule.num_ranks)
        for action in schedule.program(rank)
        if action.kind in ("B", "W")
    ]
    return repr((schedule.placement, sorted(weights, key=lambda cell: cell[0])))


@spmd(world=2)
def test_schedules_of_one_order_agree_to_the_bit() -> None:
    mesh = sc.Mesh(pp=2)
    alike: dict[str, list[str]] = {}
    for name in SCHEDULES:
        alike.setdefault(orders(plan.pipeline_schedule(name, 2, 4)), []).append(name)
    assert max(map(len, alike.values())) > 3
    for names in alike.values():
        first, *rest = (train(Recipe(schedule=name, model="dropping", clip=0.5, steps=3), mesh) for name in names)
        for other in rest:
            assert_bitwise([other.losses, other.norms, other.parameters], [first.losses, first.norms, first.parameters])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce", ["once", "per_microbatch"])
@spmd(world=4)
def test_e15_pipeline_and_zero(stage: int, reduce: str) -> None:
    """PP 2 x DP 2, at every stage."""
    mesh = sc.Mesh(pp=2)
    for schedule in ("1f1b", "zb-v"):
        recipe = Recipe(schedule=schedule, clip=0.5, stage=stage, model="dropping", options={"reduce": reduce})
        assert_follows(train(recipe, mesh), train_alone(recipe, world=2))


@spmd(world=4)
def test_e15_hybrid_mesh() -> None:
    """Two copies of a sharded pipeline of one stage, and two stages of two copies."""
    recipe = Recipe(stage=3, clip=0.5)
    assert_follows(train(recipe, sc.Mesh(pp=1, replicate=2)), train_alone(recipe, world=4))
    assert_follows(train(recipe, sc.Mesh(pp=2, replicate=2)), train_alone(recipe, world=2))


@spmd(world=2)
def test_without_sharding() -> None:
    recipe = Recipe(stage=None)
    assert_follows(train(recipe, sc.Mesh(pp=2)), train_alone(recipe), norms=False)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@spmd(world=4)
def test_steps_of_several_calls(stage: int | None) -> None:
    """Calls without an optimizer add up, tied weights included; inside ``no_sync`` nothing is reduced."""
    mesh = sc.Mesh(pp=4 if stage is None else 2)
    world = mesh.data_world
    recipe = Recipe(m=2, stage=stage, steps=6)
    layers = sc.pipeline.build_layers(MODELS_OF["tied"]())
    modules = torch.nn.ModuleDict({layer.name: layer.module for layer in layers})
    reference = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    pipe, optimizer = make(recipe, mesh)
    data = recipe.data.of_rank(mesh.data_rank, world, 2, 6)
    for step in range(6):
        batches = [recipe.data.batch(step, i) for i in range(2 * world)]
        sc.testing.reference_step(layers, batches, loss_fn=loss_fn, step=step)
        with sc.no_sync(pipe) if stage is not None and step % 3 == 1 else nullcontext():
            pipe.train_batch(data)
        if step % 3 == 2:
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
    alone = {name: p.detach().clone() for name, p in modules.named_parameters(remove_duplicate=False)}
    for name, value in parameters(pipe).items():
        torch.testing.assert_close(value, alone[name], rtol=2e-5, atol=2e-5)
