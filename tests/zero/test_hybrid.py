"""Shards and copies on a grid of four ranks: the plain loop's result, whichever axis lies inside the node."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardcore as sc
from compose.test_twins import compare
from shardcore.errors import ConfigError, RankMismatchError
from shardcore.testing import SpmdError, run_spmd, spmd, tensor_bytes
from shardcore.testing.twin import assert_bitwise, assert_close_trees
from zero.following import rows
from zero.models import Block
from zero.twin import Recipe, Trained, train_sharded, whole_parameters

WORLD = 4
COPIES_ACROSS = {"replicate": 2, "ranks_per_node": 2}
COPIES_INSIDE = {"replicate": 2, "ranks_per_node": 2, "replicate_inside": True}
SHARDS_ACROSS = {"ranks_per_node": 2}
GRIDS = {"copies across": COPIES_ACROSS, "copies inside": COPIES_INSIDE}
SAVINGS = {
    "in full": {},
    "second shard": {"secondary": 2},
    "two steps": {"hierarchical": True},
    "both": {"secondary": "node", "hierarchical": True},
}


def recipes(case: str, stage: int) -> list[Recipe]:
    """Every combination of precision, accumulation and clipping, with one optimizer or the other."""
    return [
        Recipe(
            case=case,
            stage=stage,
            precision=precision,
            accumulation=accumulation,
            clip=clip,
            optimizer="adamw" if (accumulation == 1) == (clip is None) else "sgd",
            steps=6,
            loss_scale=256.0 if precision == "fp16" else None,
        )
        for precision, accumulation, clip in itertools.product(("fp32", "bf16", "fp16"), (1, 3), (None, 0.5))
    ]


def train_all(recipes: list[Recipe], grid: dict[str, int], saving: dict[str, object] | None = None) -> list[Trained]:
    mesh = sc.Mesh(**grid, device="cpu")
    communication = sc.Communication(**saving or {})
    return [train_sharded(recipe, mesh, communication=communication) for recipe in recipes]


def check(recipes: list[Recipe], grid: dict[str, int], saving: dict[str, object] | None = None) -> None:
    by_rank = run_spmd(train_all, WORLD, recipes, grid, saving, timeout=100)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        compare(recipes, by_rank, WORLD)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("grid", GRIDS)
def test_shards_and_copies_follow_the_plain_loop(grid: str, stage: int) -> None:
    draw = random.Random(f"{grid} {stage}")
    check(draw.sample(recipes("tied", stage), 2) + draw.sample(recipes("unused", stage), 1), GRIDS[grid])


@pytest.mark.parametrize("saving", list(SAVINGS)[1:])
def test_shards_across_nodes_follow_the_plain_loop(saving: str) -> None:
    draw = random.Random(saving)
    stages = (3, 3) if "secondary" in SAVINGS[saving] else (3, 2, 1)
    chosen = [draw.choice(recipes("tied", stage)) for stage in stages]
    check(chosen, SHARDS_ACROSS, SAVINGS[saving])


@pytest.mark.full
@pytest.mark.parametrize("case", ["odd", "tied", "frozen", "unused", "nested"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid(grid: str, stage: int, case: str) -> None:
    check(recipes(case, stage), GRIDS[grid])


@pytest.mark.full
@pytest.mark.parametrize("case", ["odd", "tied", "frozen", "unused", "nested"])
@pytest.mark.parametrize("saving", list(SAVINGS)[1:])
def test_every_saving(saving: str, case: str) -> None:
    check(recipes(case, 3), SHARDS_ACROSS, SAVINGS[saving])
    if "secondary" not in SAVINGS[saving]:
        check(recipes(case, 2), SHARDS_ACROSS, SAVINGS[saving])


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("grid", GRIDS)
@spmd(world=WORLD)
def test_stages_agree_to_the_last_bit(grid: str, accumulation: int) -> None:
    mesh = sc.Mesh(**GRIDS[grid], device="cpu")
    runs = {
        stage: train_sharded(Recipe(case="tied", stage=stage, accumulation=accumulation, clip=0.5, steps=4), mesh)
        for stage in (1, 2, 3)
    }
    assert_bitwise(runs[3].parameters, runs[2].parameters)
    assert_bitwise([runs[3].losses, runs[3].norms], [runs[2].losses, runs[2].norms])
    if accumulation == 1:
        assert_bitwise(runs[1].parameters, runs[2].parameters)


@spmd(world=WORLD)
def test_a_second_shard_changes_no_bit_and_two_steps_repeat_themselves() -> None:
    mesh = sc.Mesh(**SHARDS_ACROSS, device="cpu")
    recipe = Recipe(case="tied", accumulation=2, clip=0.5, steps=3)
    runs = {
        name: train_sharded(recipe, mesh, communication=sc.Communication(**saving)) for name, saving in SAVINGS.items()
    }
    assert_bitwise(runs["second shard"].parameters, runs["in full"].parameters)
    assert_bitwise(runs["both"].parameters, runs["two steps"].parameters)
    again = train_sharded(recipe, mesh, communication=sc.Communication(**SAVINGS["both"]))
    assert_bitwise(again.parameters, runs["both"].parameters)
    two = train_sharded(
        Recipe(case="tied", stage=2, accumulation=2, clip=0.5, steps=3),
        mesh,
        communication=sc.Communication(hierarchical=True),
    )
    assert_bitwise(two.parameters, runs["two steps"].parameters)


@spmd(world=WORLD)
def test_a_second_shard_costs_the_parameters_by_its_ranks() -> None:
    """Bytes at rest: the padded parameters divided by two, and nothing else."""
    mesh = sc.Mesh(**SHARDS_ACROSS, device="cpu")
    used = {}
    for secondary in (None, 2):
        before = tensor_bytes()
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
        sc.shard(model, mesh, units=[nn.Linear], communication=sc.Communication(secondary=secondary))
        with torch.no_grad():
            model(torch.ones(1, 64))
        used[secondary] = tensor_bytes() - before
        sc.zero.offload_states(model, include=["lp_params"])
        host = 8 * 64 * 64 * 4 // WORLD
        assert tensor_bytes() - before <= host + 4096, "second shards go with the parameters"
        del model
    assert used[2] - used[None] == 8 * 64 * 64 * 4 // 2


@pytest.mark.parametrize("saving", ["second shard", "both"])
@spmd(world=WORLD)
def test_edits_and_failed_steps_renew_the_second_shard(saving: str) -> None:
    """A forward after an edit, after an exception, and after an update uses the new values."""
    mesh = sc.Mesh(**SHARDS_ACROSS, device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    sc.shard(model, mesh, units=[Block], communication=sc.Communication(**SAVINGS[saving]))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    x = rows(0, 0, 4, 7)

    def check_forward() -> None:
        with torch.no_grad():
            found = model(x)
        plain = nn.Sequential(Block(), Block())
        plain.load_state_dict(whole_parameters(model))
        torch.testing.assert_close(found, plain(x), rtol=0, atol=0)

    check_forward()
    with sc.summon(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    check_forward()
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    check_forward()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|normalized_shape"):
        model(torch.ones(4, 6))
    sc.reset_iteration(model)
    check_forward()


class Experts(nn.Module):
    """Each rank uses the block that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(7, 7)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](self.gate(x))


@pytest.mark.parametrize("saving", ["two steps", "both"])
@spmd(world=WORLD)
def test_ranks_that_use_other_units_do_not_wait_for_ever(saving: str) -> None:
    """Below stage 3 they train as in one step; at stage 3 they do, or are told which units differ."""
    mesh = sc.Mesh(**SHARDS_ACROSS, device="cpu")

    def train(stage: int, **asked: object) -> dict[str, torch.Tensor]:
        model = sc.shard(Experts(), mesh, stage=stage, units=[Block], communication=sc.Communication(**asked))
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in range(3):
            model(rows(step, mesh.rank, 4, 7), (mesh.rank + step) % 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_parameters(model)

    if saving == "two steps":
        for stage in (1, 2):
            assert_close_trees(train(stage, hierarchical=True), train(stage), rtol=1e-5, atol=1e-6)
        return
    began = time.monotonic()
    with contextlib.suppress(RankMismatchError):
        found = train(3, **SAVINGS[saving])
        assert_close_trees(found, train(2), rtol=1e-5, atol=1e-6)
    assert time.monotonic() - began < 30


BRANCHES = {
    "within a copy": [[0], [1], [0], [1]],
    "between copies": [[0], [0], [1], [1]],
    "everywhere": [[1, 0], [0], [], [1]],
}


def use(which: list[list[int]], then: str) -> None:
    mesh = sc.Mesh(**COPIES_ACROSS, device="cpu")
    model = sc.shard(Routed(), mesh, stage=3, units=[Block])
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    with sc.no_sync(model) if then == "full_grad" else contextlib.nullcontext():
        model(rows(0, mesh.rank, 4, 7), which[mesh.rank]).square().mean().backward()
    if then == "full_grad":
        sc.zero.full_grad(model.gate.weight)
    optimizer.step()


class Routed(Experts):
    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        x = self.gate(x)
        for expert in which:
            x = self.experts[expert](x)
        return x


@pytest.mark.parametrize("then", ["step", "full_grad"])
@pytest.mark.parametrize("which", BRANCHES.values(), ids=BRANCHES)
def test_ranks_on_different_branches_of_copied_shards_are_told_the_unit(which: list[list[int]], then: str) -> None:
    began = time.monotonic()
    with pytest.raises(SpmdError) as failure:
        run_spmd(use, WORLD, which, then)
    assert time.monotonic() - began < 15  # 5 s on a machine of their own
    for report in failure.value.reports:
        assert report.error_type in ("RankMismatchError", "RankFailedError"), report.headline()
        assert "experts." in report.message, report.message


@spmd(world=WORLD)
def test_a_rank_that_is_late_in_its_first_step_is_waited_for() -> None:
    mesh = sc.Mesh(**COPIES_ACROSS, device="cpu")
    model = sc.shard(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), mesh, stage=3)
    if mesh.rank == 0:
        time.sleep(2.5)
    model(torch.ones(4, 5)).sum().backward()


@spmd(world=WORLD)
def test_the_pages_example_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "docs/communication.md", "exec"), {})


@spmd(world=WORLD)
def test_sizes_that_do_not_fit_are_refused() -> None:
    mesh = sc.Mesh(**SHARDS_ACROSS, device="cpu")
    wrong = [
        ({"secondary": 3}, 3, "3 ranks do not divide the 4 ranks"),
        ({"secondary": 8}, 3, "8 ranks do not divide the 4 ranks"),
        ({"secondary": 0}, 3, "at least 1"),
        ({"secondary": 2}, 2, "needs stage 3"),
        ({"gather": "int8"}, 2, "needs stage 3"),
        ({"gather": "int4"}, 3, "expected 'int8'"),
        ({"reduce": "int8"}, 0, "needs stage 1"),
        ({"reduce": "fp8"}, 2, "expected 'int8' or 'int4'"),
    ]
    for saving, stage, message in wrong:
        with pytest.raises(ConfigError, match=message):
            sc.shard(nn.Linear(3, 3), mesh, stage=stage, communication=sc.Communication(**saving))
