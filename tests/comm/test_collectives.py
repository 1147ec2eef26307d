"""Collectives on flat buffers against torch's own, in every dtype, with the traffic they promise."""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from shardcore import comm
from shardcore.errors import RankMismatchError
from shardcore.testing import spmd

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def whole(rank: int, world: int, dtype: torch.dtype, shard_numel: int = 5) -> torch.Tensor:
    """[world x shard_numel] whole numbers, so that sums are exact in every dtype."""
    return (torch.arange(world * shard_numel) % 7 + rank).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@spmd(world=[1, 2, 3, 4])
def test_gather_fills_in_every_ranks_shard(world: int, dtype: torch.dtype) -> None:
    axis = sc.Mesh(device="cpu")["dp"]
    full = torch.full((world * 5,), -1, dtype=dtype)
    full[axis.rank * 5 : axis.rank * 5 + 5] = axis.rank
    comm.reset_traffic()
    handle = comm.gather_shards(full, axis, "test")
    handle.wait()
    handle.wait()  # once more returns at once
    assert full.tolist() == [float(rank) for rank in range(world) for _ in range(5)]
    assert comm.traffic().get("gather", 0) == (world - 1) * 5 * full.element_size()


@pytest.mark.parametrize("dtype", DTYPES)
@spmd(world=[1, 2, 3, 4])
def test_reduce_sums_into_this_ranks_shard(world: int, dtype: torch.dtype) -> None:
    axis = sc.Mesh(device="cpu")["dp"]
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


@spmd(world=3)
def test_reduction_does_not_depend_on_timing() -> None:
    """Sums are in rank order: the same bits each time, where floating addition does not commute with order."""
    axis = sc.Mesh(device="cpu")["dp"]
    start = torch.randn(300, generator=torch.Generator().manual_seed(axis.rank)) * 10.0 ** (axis.rank * 3)
    found = []
    for _ in range(5):
        full = start.clone()
        comm.reduce_shards(full, axis, "test").wait()
        found.append(full[axis.rank * 100 : axis.rank * 100 + 100])
    assert all(torch.equal(each, found[0]) for each in found)


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
