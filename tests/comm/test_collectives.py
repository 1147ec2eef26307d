"""Collectives on flat buffers against torch's own, in every dtype, with the traffic they promise."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import pytest
import torch

import shardcore as sc
from shardcore import comm
from shardcore._core import HostLink
from shardcore.comm import watch
from shardcore.comm.neighbours import link_of
from shardcore.comm.watch import board
from shardcore.errors import RankMismatchError, StateError
from shardcore.mesh import Axis
from shardcore.testing import spmd

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


LINKED = pytest.mark.parametrize("linked", [True, False], ids=["link", "gloo"])
"""Both ways on CPU: ranks that read each other's memory, and gloo."""


def cpu_axis(linked: bool) -> Axis:
    axis = sc.Mesh(device="cpu")["dp"]
    if not linked:
        board().links[axis.key] = None
    elif axis.size > 1 and link_of(axis) is None:
        pytest.skip(why_no_link())
    return axis


def why_no_link() -> str:
    """What keeps a process of this machine from reading its own memory; where nothing does, ranks must be linked."""
    try:
        ends = [HostLink(rank) for rank in range(2)]
        ends[0].connect([end.card() for end in ends])
    except StateError as error:
        return str(error)
    pytest.fail("processes may be read here, but the ranks of this machine are not linked")


def whole(rank: int, world: int, dtype: torch.dtype, shard_numel: int = 5) -> torch.Tensor:
    """[world x shard_numel] whole numbers, so that sums are exact in every dtype."""
    return (torch.arange(world * shard_numel) % 7 + rank).to(dtype)


@LINKED
@pytest.mark.parametrize("dtype", DTYPES)
@spmd(world=[1, 2, 3, 4])
def test_gather_fills_in_every_ranks_shard(world: int, dtype: torch.dtype, linked: bool) -> None:
    axis = cpu_axis(linked)
    full = torch.full((world * 5,), -1, dtype=dtype)
    full[axis.rank * 5 : axis.rank * 5 + 5] = axis.rank
    comm.reset_traffic()
    handle = comm.gather_shards(full, axis, "test")
    handle.wait()
    handle.wait()  # once more returns at once
    assert full.tolist() == [float(rank) for rank in range(world) for _ in range(5)]
    assert comm.traffic().get("gather", 0) == (world - 1) * 5 * full.element_size()


@LINKED
@pytest.mark.parametrize("dtype", DTYPES)
@spmd(world=[1, 2, 3, 4])
def test_reduce_sums_into_this_ranks_shard(world: int, dtype: torch.dtype, linked: bool) -> None:
    axis = cpu_axis(linked)
    full = whole(axis.rank, world, dtype)
    expected = torch.stack([whole(rank, world, dtype) for rank in range(world)]).sum(0)
    comm.reset_traffic()
    comm.reduce_shards(full, axis, "test").wait()
    mine = slice(axis.rank * 5, axis.rank * 5 + 5)
    assert torch.equal(full[mine], expected[mine])
    assert comm.traffic().get("reduce", 0) == (world - 1) * 5 * full.element_size()


@pytest.mark.parametrize("dtype", DTYPES)
@spmd(world=[1, 2, 3])
def test_all_reduce_and_broadcast(world: int, dtype: torch.dtype) -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    total, most, copy = (whole(axis.rank, world, dtype) for _ in range(3))
    comm.all_reduce(total, axis, "test").wait()
    comm.all_reduce(most, axis, "test", maximum=True).wait()
    comm.broadcast(copy, axis, world - 1, "test").wait()
    every = torch.stack([whole(rank, world, dtype) for rank in range(world)])
    assert torch.equal(total, every.sum(0))
    assert torch.equal(most, every.amax(0))
    assert torch.equal(copy, every[-1])


@LINKED
@spmd(world=[3, 4])
def test_reduction_is_in_rank_order(world: int, linked: bool) -> None:
    """The same bits each time and each way, where floating addition depends on the order."""
    axis = cpu_axis(linked)
    starts = [
        torch.randn(world * 100, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 3)
        for rank in range(world)
    ]
    mine = slice(axis.rank * 100, axis.rank * 100 + 100)
    expected = starts[0][mine].clone()
    for start in starts[1:]:
        expected += start[mine]
    for _ in range(5):
        full = starts[axis.rank].clone()
        comm.reduce_shards(full, axis, "test").wait()
        assert torch.equal(full[mine], expected)


@spmd(world=3)
def test_one_rank_that_may_not_be_read_keeps_all_with_gloo() -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    with pytest.MonkeyPatch.context() as patch:
        if axis.rank == 1:
            patch.setenv("SHARDCORE_HOST_LINK", "0")
        assert link_of(axis) is None
    full = torch.full((3,), float(axis.rank))
    comm.gather_shards(full, axis, "test").wait()
    assert full.tolist() == [0.0, 1.0, 2.0]


@spmd(world=2)
def test_many_exchanges_under_way_at_once() -> None:
    axis = cpu_axis(linked=True)
    buffers = [torch.full((2 * n,), float(axis.rank)) for n in range(1, 200)]
    handles = [comm.gather_shards(full, axis, f"group {i}") for i, full in enumerate(buffers)]
    for full, handle in zip(reversed(buffers), reversed(handles), strict=True):
        handle.wait()
        assert full.tolist() == [0.0] * (full.numel() // 2) + [1.0] * (full.numel() // 2)


@spmd(world=2)
def test_linked_ranks_in_different_collectives_are_told_and_read_nothing() -> None:
    axis = cpu_axis(linked=True)
    full = torch.full((8,), float(axis.rank))
    with pytest.raises(RankMismatchError, match=r"gather unit [ab]"):
        comm.gather_shards(full, axis, "unit a" if axis.rank == 0 else "unit b").wait()
    assert full.tolist() == [float(axis.rank)] * 8


@spmd(world=2)
def test_nothing_to_send_is_no_collective() -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    comm.reset_traffic()
    for operation in (comm.gather_shards, comm.reduce_shards, comm.all_reduce):
        operation(torch.empty(0), axis, "test").wait()
    assert not comm.traffic()


@spmd(world=3)
def test_exchange_gives_every_ranks_value() -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    assert comm.exchange({"rank": axis.rank, "text": "é" * axis.rank}, axis, "test") == [
        {"rank": rank, "text": "é" * rank} for rank in range(3)
    ]


@spmd(world=3)
def test_agree_names_the_odd_rank_and_the_difference() -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    comm.agree_on("the plan", "same", "detail", axis, lambda a, b: "never asked")
    text = "b" if axis.rank == 2 else "a"
    with pytest.raises(RankMismatchError, match=r"the plan differs between ranks \[0, 1\] and ranks \[2\].*a is not b"):
        comm.agree_on("the plan", text, text, axis, lambda a, b: f"{a} is not {b}")


@spmd(world=2)
def test_a_wait_that_failed_is_not_done_at_the_next_call() -> None:
    axis = cpu_axis(linked=True)
    full = torch.full((8,), float(axis.rank))
    if axis.rank == 1:
        time.sleep(2.5)
        comm.gather_shards(full, axis, "late").wait()
        return
    handle = comm.gather_shards(full, axis, "late")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCORE_TIMEOUT", "0.1")
        with pytest.raises(RankMismatchError, match="no answer"):
            handle.wait()
    handle.wait()
    assert full.tolist() == [0.0] * 4 + [1.0] * 4


@spmd(world=3)
def test_a_rank_that_waits_long_says_for_whom() -> None:
    """Another rank may be in a call of another library, where nothing can be seen of it."""
    axis, said = sc.Mesh()["dp"], Said()
    watch.LONG_WAIT_S, patience = 1.5, watch.LONG_WAIT_S
    logging.getLogger("shardcore").addHandler(said)
    try:
        if axis.rank == 1:
            time.sleep(4)
        comm.all_reduce(torch.ones(3), axis, "late").wait()
    finally:
        watch.LONG_WAIT_S = patience
        logging.getLogger("shardcore").removeHandler(said)
    told = [line for line in said.lines if "for ranks [1] in collective" in line and "'all-reduce late [3]'" in line]
    assert len(told) == (axis.rank != 1), said.lines


@spmd(world=2)
def test_a_collective_that_ends_just_as_a_wait_for_it_gives_up_is_complete() -> None:
    class Work:
        waits = 0

        def wait(self, timeout: timedelta = timedelta.max) -> bool:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")
            return True

        def is_completed(self) -> bool:
            return self.waits > 0

    work = Work()
    watch.wait(work, watch.record(sc.Mesh()["dp"], "all-reduce", "late", 3))
    assert work.waits == 2


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
