"""Collectives in two steps: whoever waits for what, and whoever waits for nothing."""

from __future__ import annotations

import time

import pytest
import torch

import shardcore as sc
from shardcore import comm
from shardcore.errors import RankMismatchError
from shardcore.testing import spmd


def two_steps() -> tuple[sc.Mesh, comm.Route, int]:
    """A mesh of two nodes, a route in two steps, and this rank's place on it."""
    mesh = sc.Mesh(device="cpu", ranks_per_node=2)
    split = mesh.split("shard", 2)
    return mesh, comm.Route(split.axis, split), split.axis.rank


@spmd(world=4)
def test_ranks_may_wait_in_any_order() -> None:
    mesh, route, rank = two_steps()
    buffers = [torch.full((4 * numel,), float(rank)) for numel in (3, 5, 7)]
    handles = [route.gather(full, f"group {i}") for i, full in enumerate(buffers)]
    for i in (2, 0, 1) if mesh.rank % 2 else (1, 2, 0):
        handles[i].wait()
        handles[i].wait()  # once more returns at once
    for full in buffers:
        assert full.view(4, -1)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


@spmd(world=4)
def test_a_rank_that_does_not_wait_keeps_nobody() -> None:
    """Its next collective, on another axis, starts the second step that others wait for."""
    mesh, route, rank = two_steps()
    full = torch.full((8,), float(rank))
    handle = route.gather(full, "test")
    if mesh.rank != 1:
        handle.wait()
    assert comm.exchange(mesh.rank, mesh["dp"], "test") == [0, 1, 2, 3]
    assert comm.program_digest() == comm.exchange(comm.program_digest(), mesh["dp"], "test")[0]
    handle.wait()
    assert full.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


@spmd(world=4)
def test_a_second_step_that_others_do_not_join_is_an_error() -> None:
    mesh, route, rank = two_steps()
    full = torch.full((8,), float(rank))
    began = time.monotonic()
    handle = route.gather(full, "one" if mesh.rank % 2 else "other")
    with pytest.raises(RankMismatchError, match="one inside"):
        handle.wait()
    assert time.monotonic() - began < 20


@spmd(world=4)
def test_sums_are_taken_inside_first_and_always_alike() -> None:
    _, route, rank = two_steps()
    parts = [torch.randn(400, generator=torch.Generator().manual_seed(i)) * 10.0 ** (3 * i) for i in range(4)]
    mine = slice(rank * 100, rank * 100 + 100)
    # Places on the route are ordered by place in the node, then by node.
    expected = (parts[0][mine] + parts[2][mine]) + (parts[1][mine] + parts[3][mine])
    for _ in range(3):
        full = parts[rank].clone()
        route.reduce(full, "test").wait()
        assert torch.equal(full[mine], expected)
