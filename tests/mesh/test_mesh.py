"""The grid of ranks: sizes, positions, groups, and what does not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardcore as sc
from shardcore.errors import ConfigError
from shardcore.testing import spmd


@spmd(world=4)
def test_axes_of_a_hybrid_mesh() -> None:
    mesh = sc.Mesh(replicate=2, device="cpu")
    rank = dist.get_rank()
    assert mesh["shard"].ranks == ((0, 1) if rank < 2 else (2, 3))
    assert mesh["replicate"].ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
    assert mesh["dp"].ranks == (0, 1, 2, 3)
    assert (mesh.data_rank, mesh.data_world) == (rank, 4)
    inside = sc.Mesh(replicate=2, replicate_inside=True, device="cpu")
    assert inside["replicate"].ranks == mesh["shard"].ranks
    assert inside["shard"].ranks == mesh["replicate"].ranks


@spmd(world=4)
def test_model_axes_are_innermost() -> None:
    mesh = sc.Mesh(tp=2, device="cpu")
    rank = dist.get_rank()
    assert mesh["tp"].ranks == ((0, 1) if rank < 2 else (2, 3))
    assert (mesh.data_rank, mesh.data_world) == (rank // 2, 2)
    for name in ("tp", "dp"):
        total = sc.comm.sum_over_ranks(torch.tensor([float(rank)]), mesh[name], "test")
        assert total.item() == sum(mesh[name].ranks)


@spmd(world=4)
def test_experts_lie_over_neighbours_and_sequences_over_nearer_ones() -> None:
    mesh = sc.Mesh(ep=2, device="cpu")
    rank = dist.get_rank()
    assert mesh["ep"].ranks == ((0, 1) if rank < 2 else (2, 3))
    assert mesh["shard"].ranks == (0, 1, 2, 3)
    experts = mesh.data_axes(experts=True)
    assert experts.shard.ranks == experts.every.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
    assert (mesh.data_axes().every.key, mesh.torch["shard"].size()) == (mesh["dp"].key, 4)
    mesh = sc.Mesh(cp=2, ep=2, device="cpu")
    assert mesh["cp"].ranks == ((0, 1) if rank < 2 else (2, 3))
    assert mesh["ep"].ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
    assert (mesh.data_rank, mesh.data_world) == (rank // 2, 2)
    assert mesh.data_axes().shard.ranks == (0, 1, 2, 3)
    assert mesh.data_axes(experts=True).shard.ranks == mesh["cp"].ranks


@spmd(world=4)
def test_a_device_mesh_reads_and_writes() -> None:
    two = sc.Mesh.from_torch(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    assert (two["replicate"].size, two["shard"].size) == (2, 2)
    assert two.torch.mesh_dim_names == ("pp", "replicate", "shard", "cp", "tp")
    assert two.torch["shard"].size() == 2
    one = sc.Mesh.from_torch(init_device_mesh("cpu", (4,)))
    assert (one["replicate"].size, one["shard"].size) == (1, 4)


@spmd(world=4)
def test_wrong_sizes_name_every_size_and_a_remedy() -> None:
    wrong = [
        ({"dp": 3}, "leave dp out"),
        ({"tp": 3}, "does not divide the 4 ranks"),
        ({"pp": 2, "cp": 4}, "does not divide the 4 ranks"),
        ({"replicate": 3}, "choose a divisor of 4"),
        ({"ep": 3}, "choose a divisor of 4"),
        ({"tp": 0}, "at least 1"),
        ({"dp": "all"}, "at least 1"),
    ]
    for sizes, remedy in wrong:
        with pytest.raises(ConfigError, match=remedy) as found:
            sc.Mesh(**sizes, device="cpu")
        assert "on 4 ranks" in str(found.value)
    with pytest.raises(ConfigError, match="no axis 'data'"):
        sc.Mesh(device="cpu")["data"]


@spmd(world=1, init=False)
def test_one_process_needs_neither_launcher_nor_group() -> None:
    mesh = sc.Mesh(device="cpu")
    assert not dist.is_initialized()
    assert (mesh.world, mesh.rank, mesh["dp"].group) == (1, 0, None)


@spmd(world=2, init=False)
def test_the_job_is_read_from_the_environment() -> None:
    mesh = sc.Mesh(device="cpu")
    assert mesh.world == 2
    assert mesh.rank == dist.get_rank()
    dist.destroy_process_group()
