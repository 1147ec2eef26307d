"""Which ranks share a node, and axes cut into blocks."""

from __future__ import annotations

import pytest

import shardcore as sc
from shardcore.errors import ConfigError
from shardcore.testing import spmd


@spmd(world=4)
def test_a_shard_size_is_another_word_for_copies() -> None:
    mesh = sc.Mesh(shard=2, device="cpu")
    assert (mesh["replicate"].size, mesh["shard"].size) == (2, 2)
    assert mesh["shard"].ranks == sc.Mesh(replicate=2, device="cpu")["shard"].ranks
    for sizes, remedy in (
        ({"shard": 3}, "choose a divisor of 4"),
        ({"shard": 8}, "choose a divisor of 4"),
        ({"shard": 4, "replicate": 4}, "give one of the two"),
        ({"ranks_per_node": 3}, "a divisor of 4"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            sc.Mesh(**sizes, device="cpu")


@spmd(world=4)
def test_neighbours_in_a_node() -> None:
    assert sc.Mesh(device="cpu").num_in_node("shard") == 4  # the launcher says that all ranks share one
    assert sc.Mesh(device="cpu", ranks_per_node=2).num_in_node("shard") == 2
    assert sc.Mesh(device="cpu", ranks_per_node=2, replicate=2).num_in_node("shard") == 2
    inside = sc.Mesh(device="cpu", ranks_per_node=2, replicate=2, replicate_inside=True)
    assert (inside.num_in_node("shard"), inside.num_in_node("replicate")) == (1, 2)
    assert sc.Mesh(device="cpu", ranks_per_node=2, tp=2).num_in_node("shard") == 1


@spmd(world=4)
def test_unknown_nodes_are_refused_where_they_matter() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3" if sc.Mesh(device="cpu").rank == 1 else "4")
        mesh = sc.Mesh(device="cpu")
        assert mesh.ranks_per_node is None
        with pytest.raises(ConfigError, match="ranks_per_node"):
            mesh.num_in_node("shard")


@spmd(world=4)
def test_an_axis_in_blocks() -> None:
    mesh = sc.Mesh(device="cpu")
    split = mesh.split("shard", 2)
    rank = mesh.rank
    assert split.inside.ranks == ((0, 1) if rank < 2 else (2, 3))
    assert split.across.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
    assert split.axis.ranks == (0, 2, 1, 3)
    assert split.axis.ranks[split.axis.rank] == rank
    assert mesh.split("shard", 2) is split
    with pytest.raises(ConfigError, match="choose a divisor of 4"):
        mesh.split("shard", 3)
