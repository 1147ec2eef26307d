"""Ranks on different branches at stage 3: each joins what the others use, and training equals the single process's.

Only what nobody can join - a step less, a collective call by some ranks - is an error, on all ranks, within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore import comm
from shardcore.comm import branches
from shardcore.errors import RankMismatchError
from shardcore.protocols import find_root
from shardcore.testing import SpmdError, run_spmd, spmd
from zero.following import check_follows, rows, seeded
from zero.models import Block
from zero.twin import largest_difference, whole_parameters

LIMIT_S = 5.0
NUM_BLOCKS = 4
Pattern = list[list[list[int]]]
"""Per step and rank, the blocks that are used, in order."""


class Branching(nn.Module):
    """Blocks of different sizes, used as told, around a common head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7, 9 + 4 * i) for i in range(NUM_BLOCKS))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for i in used:
            x = self.blocks[i](x)
        return self.head(x)


def following(pattern: Pattern) -> Callable[[nn.Module, int, int], None]:
    """One step of the pattern."""

    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 7), pattern[step][rank]).square().mean().backward()

    return play


def train(pattern: Pattern, **options: Any) -> None:
    model = check_follows(Branching, following(pattern), stage=3, steps=len(pattern), **options)
    assert not any(group.full.untyped_storage().nbytes() for group in find_root(model).groups), "all are released"


SAME = [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "pattern",
    [
        [[[0, 1], [2, 3]]] * 3,  # two experts each
        [[[0, 1, 2, 3], [3, 2, 1, 0]]] * 3,  # opposite orders
        [[[0, 1, 2, 3], [0, 3]], [[], [1]], SAME],
        [[[0, 0, 1], [1]], SAME, [[2], [3, 2, 0, 0]]],
        [SAME, SAME, SAME, [[0, 1, 2, 3], [0, 3]], [[1], [2]]],  # from a known order
    ],
    ids=["experts", "opposite", "skipped", "repeated", "late"],
)
def test_c1_ranks_that_use_other_units_train_as_one_process(pattern: Pattern) -> None:
    run_spmd(train, 2, pattern)


def used_blocks(world: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=5), min_size=world, max_size=world)


def patterns(world: int) -> st.SearchStrategy[Pattern]:
    """Any use of blocks by any rank, from the first step on or after steps that all share."""
    known = st.sampled_from([0, 0, 2]).map(lambda number: [[list(range(NUM_BLOCKS))] * world] * number)
    return st.builds(lambda a, b: a + b, known, st.lists(used_blocks(world), min_size=1, max_size=3))


def train_each(each: list[Pattern]) -> None:
    """Every pattern begins anew, on ranks that have not parted yet."""
    for pattern in each:
        train(pattern)
        comm.exchange(0, sc.Mesh()["dp"], "end of a pattern")
        comm.clear_failure()


def run_random(num_examples: int, world: int) -> None:
    # Each example is a run of several processes, too slow to shrink.
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(each=st.lists(patterns(world), min_size=8, max_size=8))
    def check(each: list[Pattern]) -> None:
        note(f"patterns: {each}")
        run_spmd(train_each, world, each, timeout=100)

    check()


@pytest.mark.parametrize("world", [2, 3])
def test_c1_random_branches_train_as_one_process(world: int) -> None:
    run_random(1, world)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_c1_many_random_branches_train_as_one_process(world: int) -> None:
    run_random(12, world)


class Experts(nn.Module):
    """Four experts; a row goes to those that its router names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, routes: list[int]) -> torch.Tensor:
        return sum(self.experts[i](x) for i in routes)  # type: ignore[return-value]


@spmd(world=2)
def test_c2_each_experts_gradient_is_its_sum_over_ranks_divided_by_their_number() -> None:
    mesh, routes = sc.Mesh(), [[0, 1], [2, 3]]
    model = sc.shard(seeded(Experts), mesh, stage=3)
    alone = seeded(Experts)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
    model(rows(0, mesh.rank, 4, 7), routes[mesh.rank]).square().mean().backward()
    optimizer.step()
    start = {name: p.detach().clone() for name, p in alone.named_parameters()}
    for rank in range(2):
        alone(rows(0, rank, 4, 7), routes[rank]).square().mean().backward()
    found = whole_parameters(model)
    for name, param in alone.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(start[name] - found[name], param.grad / 2, rtol=1e-5, atol=1e-6)


class Woven(nn.Module):
    """Branches through recomputed, tied and borrowed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.embed = nn.Embedding(11, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embed(tokens)
        if branch == 0:
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
            x = x @ self.blocks[2].up.weight.t() @ self.blocks[2].up.weight
        else:
            x = checkpoint(lambda y: self.blocks[3](self.blocks[1](y)), x, use_reentrant=True)
        return self.head(x)


@spmd(world=2)
def test_branches_through_recomputed_tied_and_borrowed_weights() -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        model(tokens, (step + rank) % 2).square().mean().backward()

    check_follows(Woven, play, stage=3)


@spmd(world=2)
def test_forwards_of_different_number_before_a_common_step() -> None:
    """As texts of different lengths are generated before training goes on."""

    def play(model: nn.Module, step: int, rank: int) -> None:
        if find_root(model) is not None:
            with torch.no_grad():
                for _ in range(1 + 2 * rank):
                    model(rows(9, rank, 2, 7), [0, 1, 2, 3])
        model(rows(step, rank, 4, 7), [0, 1, 2, 3]).square().mean().backward()

    check_follows(Branching, play, stage=3)


LENGTHS = {
    "longer after common ones": [(0, 0), (3, 3), (2, 4), (1, 1)],
    "none at first on one": [(0, 0), (0, 3), (2, 2)],
    "shorter than before": [(0, 0), (4, 4), (4, 2), (0, 0)],
    "one with gradients more": [(0, 0), (2, -2)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("budget", [None, 2560])
@spmd(world=2)
def test_forwards_of_different_number_after_common_steps(lengths: list[tuple[int, int]], budget: int | None) -> None:
    """The order of each forward is known by then, their number is not. (Negative numbers: with gradients.)"""

    def play(model: nn.Module, step: int, rank: int) -> None:
        if find_root(model) is not None:
            count = lengths[step][rank]
            with torch.set_grad_enabled(count < 0):
                for _ in range(abs(count)):
                    model(rows(9, rank, 2, 7), [0, 1, 2, 3])
        model(rows(step, rank, 4, 7), [0, 1, 2, 3]).square().mean().backward()

    check_follows(Branching, play, stage=3, steps=len(lengths), budget=budget)


@spmd(world=2)
def test_ranks_that_evaluate_alike_compare_notes_twice_only() -> None:
    """Where the row of forwards without gradients begins, and where it ends."""
    asked = []
    ask = branches.all_enter

    def count(axis: Any, label: str) -> bool:
        asked.append(label)
        return ask(axis, label)

    def train(num_evaluated: int) -> int:
        asked.clear()
        with torch.no_grad():
            for _ in range(num_evaluated):
                model(rows(9, 0, 2, 7), [0, 1, 2, 3])
        model(rows(0, 0, 4, 7), [0, 1, 2, 3]).square().mean().backward()
        optimizer.step()
        return len(asked)

    model = sc.shard(seeded(Branching), sc.Mesh(), stage=3)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    branches.all_enter = count
    try:
        numbers = [train(n) for n in (0, 0, 0, 9, 9, 0, 0)]
    finally:
        branches.all_enter = ask
    assert numbers[2:] == [0, 2, 0, 1, 0]


@spmd(world=2)
def test_backwards_of_different_number_on_different_branches() -> None:
    """Gradients of all backwards are summed and averaged over ranks, however many each rank has."""

    def play(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(1 + 2 * rank):
            model(rows(10 * step + micro, rank, 4, 7), [rank, 2]).square().mean().backward()

    check_follows(Branching, play, stage=3)


@spmd(world=2)
def test_gradients_are_dropped_by_all_although_some_have_none() -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        if find_root(model) is not None and step:
            if rank:
                model(rows(9, rank, 4, 7), [0]).square().mean().backward()
            model.zero_grad()
        model(rows(step, rank, 4, 7), [rank, 2]).square().mean().backward()

    check_follows(Branching, play, stage=3)


@spmd(world=2)
def test_two_models_on_different_branches() -> None:
    """Ranks use them in different order, too; units of the same name and size are told apart."""
    mesh = sc.Mesh()
    models = [sc.shard(seeded(Branching, seed), mesh, stage=3) for seed in (1, 2)]
    alone = [seeded(Branching, seed) for seed in (1, 2)]
    optimizers = [sc.optimizer(torch.optim.SGD, model, lr=0.1) for model in models]
    for step in range(2):
        outputs = {i: models[i](rows(step, mesh.rank, 4, 7), [i, mesh.rank]) for i in (mesh.rank, 1 - mesh.rank)}
        for i in range(2):
            outputs[i].square().mean().backward()
            optimizers[i].step()
            optimizers[i].zero_grad()
            for rank in range(2):
                (alone[i](rows(step, rank, 4, 7), [i, rank]).square().mean() / 2).backward()
            torch.optim.SGD(alone[i].parameters(), lr=0.1).step()
            alone[i].zero_grad()
    for model, plain in zip(models, alone, strict=True):
        expected = {name: p.detach() for name, p in plain.named_parameters()}
        assert largest_difference(whole_parameters(model), expected)[0] <= 1e-6


@spmd(world=2)
def test_a_guest_holds_one_unit_at_a_time() -> None:
    mesh = sc.Mesh()
    model = sc.shard(seeded(Branching), mesh, stage=3)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    root: Any = find_root(model)
    held: list[int] = []
    for group in root.groups:
        join = group.join_gather

        def counted(join: Callable[[], None] = join) -> None:
            held.append(sum(g.full.untyped_storage().nbytes() > 0 for g in root.groups))
            join()

        group.join_gather = counted
    for step in range(2):
        model(rows(step, mesh.rank, 4, 7), [[0, 1, 2, 3], []][mesh.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool(held) == (mesh.rank == 1)
    # The model's own head is in use all the time, and the one that this rank waits for has its memory.
    assert max(held, default=0) <= 2


@spmd(world=2)
def test_a_common_order_is_never_agreed_on_by_turns() -> None:
    """Steps that depart from their plan on all ranks alike, evaluation and state_dict included, take no turns."""
    mesh = sc.Mesh()
    model = sc.shard(seeded(Branching), mesh, stage=3)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for step, used in enumerate([[0, 1], [3, 2], [0, 1, 2, 3], [0]]):
        model(rows(step, mesh.rank, 4, 7), used).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(rows(step, mesh.rank, 4, 7), used[::-1])
        sc.state_dict(model)
    root: Any = find_root(model)
    assert not root._takes_turns()
    assert root.prefetcher.coordinator.plan("train") is not None


# --------------------------------------------------------------------------------------------------- what is an error


def apart_then(what: str) -> None:
    """One step on different branches; then ranks come to different things."""
    mesh = sc.Mesh()
    model = sc.shard(seeded(Branching), mesh, stage=3)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    common = [0, 1, 2, 3]

    def one_backward(used: list[int]) -> None:
        model(rows(0, mesh.rank, 4, 7), used).square().mean().backward()

    one_backward(common if what.startswith("from a common order") else [mesh.rank])
    optimizer.step()
    optimizer.zero_grad()
    began = time.monotonic()
    try:
        one_backward(common)
        if mesh.rank == 0 and what.endswith("one backward more"):
            one_backward(common)
        elif mesh.rank == 0 and what.endswith("state_dict on one rank"):
            model.state_dict()
        elif mesh.rank == 0 and what.endswith("summon on one rank"):
            with sc.summon(model, writeback=True):
                pass
        optimizer.step()
        optimizer.zero_grad()
        one_backward(common)
    except RankMismatchError:
        assert time.monotonic() - began < LIMIT_S
        raise


@pytest.mark.parametrize(
    "what",
    [
        "state_dict on one rank",
        "summon on one rank",
        "from a common order, state_dict on one rank",
        "from a common order, summon on one rank",
        "from a common order, one backward more",
    ],
)
def test_c1_what_cannot_be_joined_is_an_error_on_all_ranks_that_names_a_unit(what: str) -> None:
    with pytest.raises(SpmdError) as failure:
        run_spmd(apart_then, 2, what)
    for report in failure.value.reports:
        assert report.error_type in ("RankMismatchError", "RankFailedError"), report.headline()
        assert "blocks.0" in report.message or "head" in report.message or "root#" in report.message, report.message
