"""Ranks that wait for one another along several axes: an error on each where nothing can wake them, nowhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardcore as sc
from shardcore import comm
from shardcore.comm.circles import Wait, closed_circle, describe
from shardcore.errors import RankFailedError, RankMismatchError
from shardcore.mesh import Axis
from shardcore.testing import spmd


def wait_of(axis: str, ranks: Sequence[int], sequence: int = 0, **entered: int) -> Wait:
    return Wait(axis, list(ranks), sequence, f"collective number {sequence} of axis '{axis}'", entered)


AROUND = {0: wait_of("01", (0, 1)), 1: wait_of("13", (1, 3)), 3: wait_of("23", (2, 3)), 2: wait_of("02", (0, 2))}
"""Along the edges of a square, each rank waits for the next."""


def test_a_circle_over_two_axes_is_found_by_each_of_its_ranks() -> None:
    for rank in range(4):
        assert closed_circle(AROUND, rank) == AROUND
    assert describe(AROUND, 0).startswith(
        "rank 0 waits for ranks [1] in collective number 0 of axis '01'; rank 1 waits"
    )


def test_ranks_behind_a_circle_are_in_it_and_those_before_it_are_not() -> None:
    behind = AROUND | {4: wait_of("34", (3, 4))}
    assert closed_circle(behind, 4).keys() == behind.keys()
    apart = AROUND | {4: wait_of("45", (4, 5)), 5: wait_of("45", (4, 5))}
    assert closed_circle(apart, 4) == {}


@pytest.mark.parametrize(
    "change",
    [
        {2: None},
        {2: wait_of("24", (2, 4))},
        {2: wait_of("02", (0, 2), **{"23": 1})},
        {3: wait_of("13", (1, 3)), 1: wait_of("13", (1, 3))},
    ],
    ids=["one computes", "one waits for a rank that computes", "one has entered it already", "two wait in the same"],
)
def test_ranks_that_can_go_on_are_in_no_circle(change: dict[int, Wait | None]) -> None:
    waits = {rank: wait for rank, wait in (AROUND | change).items() if wait is not None}
    assert all(closed_circle(waits, rank) == {} for rank in waits)


@given(st.data())
def test_a_program_that_all_ranks_run_is_never_a_circle(data: st.DataObject) -> None:
    """Collectives over any sets of ranks, the same order on all, each rank as far as it happens to be."""
    world = data.draw(st.integers(2, 6))
    subsets = st.sets(st.integers(0, world - 1), min_size=2).map(sorted)
    program = data.draw(st.lists(subsets, min_size=1, max_size=8))
    entered: list[dict[str, int]] = [{} for _ in range(world)]
    there: list[list[int]] = [[] for _ in program]  # the ranks in each
    for rank in data.draw(st.lists(st.integers(0, world - 1), max_size=40)):
        inside = [n for n, ranks in enumerate(there) if rank in ranks]
        if any(len(there[n]) < len(program[n]) for n in inside):
            continue  # it waits
        ahead = [n for n, ranks in enumerate(program) if rank in ranks and rank not in there[n]]
        if ahead:
            key = str(program[ahead[0]])
            entered[rank][key] = entered[rank].get(key, 0) + 1
            there[ahead[0]].append(rank)
    waits = {}
    for n, ranks in enumerate(program):
        number = sum(other == ranks for other in program[:n])
        for rank in there[n]:
            if len(there[n]) < len(ranks):
                waits[rank] = Wait(str(ranks), ranks, number, "", entered[rank])
    assert all(closed_circle(waits, rank) == {} for rank in waits)


def enter_both(first: Axis, second: Axis) -> None:
    for axis in (first, second):
        comm.all_reduce(torch.ones(3), axis, "something").wait()


@spmd(world=4)
def test_every_rank_of_a_circle_raises_within_seconds(world: int) -> None:
    mesh = sc.Mesh(device="cpu", replicate=2)
    first, second = ("shard", "replicate") if mesh.rank in (0, 3) else ("replicate", "shard")
    start = time.monotonic()
    # A rank whose look comes late learns it from one that has raised.
    with pytest.raises((RankMismatchError, RankFailedError), match=r"in a circle.*rank \d waits for ranks \[\d\] in"):
        enter_both(mesh[first], mesh[second])
    assert time.monotonic() - start < 10


@spmd(world=4)
def test_ranks_that_wait_for_a_slow_one_along_two_axes_go_on(world: int) -> None:
    mesh = sc.Mesh(device="cpu", replicate=2)
    if mesh.rank == 3:
        time.sleep(5)
    enter_both(mesh["replicate"], mesh["shard"])
