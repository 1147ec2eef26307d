"""On a fake map of two nodes of two ranks, the bytes between nodes equal the formulas of docs/communication.md.

M is the bytes of the padded parameters and gradients (both fp32), n the nodes, k the ranks of a node, W = n k. Counted
is one training step: a gather in forward, one in backward, one reduction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore import comm
from shardcore.protocols import find_root
from shardcore.testing import run_spmd

NUM_NODES, PER_NODE = 2, 2
WORLD = NUM_NODES * PER_NODE
WIDTH, NUM_UNITS = 64, 3


def one_step(grid: dict[str, Any], stage: int, accumulation: int, saving: dict[str, Any]) -> tuple[int, int]:
    """(bytes that this rank takes from the other node in the second step, M)."""
    mesh = sc.Mesh(**grid, ranks_per_node=PER_NODE, device="cpu")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)])
    # Nothing is kept from forward to backward but the last unit, which backward uses next.
    sc.shard(
        model,
        mesh,
        stage=stage,
        units=[nn.Linear],
        prefetch=sc.zero.PrefetchLimits(max_reuse_nbytes=0),
        communication=sc.Communication(**saving),
    )
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):
        comm.reset_traffic()
        for _ in range(accumulation):
            model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = comm.traffic_by_edge()
    received = sum(n for (source, rank), n in sent.items() if source // PER_NODE != rank // PER_NODE)
    return received, sum(group.nbytes for group in find_root(model).groups)


def between_nodes(grid: dict[str, Any], stage: int = 3, accumulation: int = 1, **saving: Any) -> float:
    """Bytes between nodes of all ranks in one step, as a multiple of M."""
    by_rank = run_spmd(one_step, WORLD, grid, stage, accumulation, saving)
    return sum(received for received, _ in by_rank) / by_rank[0][1]


HYBRID, INSIDE, FLAT = {"replicate": NUM_NODES}, {"replicate": PER_NODE, "replicate_inside": True}, {}
MICS = {"shard": PER_NODE}
n, k, W = NUM_NODES, PER_NODE, WORLD
GATHERS = 2 - 1 / NUM_UNITS
"""Gathers of M in a step: forward's, and backward's without the unit that forward used last."""


@pytest.mark.parametrize(
    ("name", "grid", "saving", "expected"),
    [
        ("ZeRO-3 over all ranks", FLAT, {}, (GATHERS + 1) * (W - k)),
        ("in two steps", FLAT, {"hierarchical": True}, (GATHERS + 1) * (n - 1)),
        ("copies across: each rank's shard is summed over the nodes, around a ring", HYBRID, {}, 2 * (n - 1)),
        ("copies inside", INSIDE, {}, (GATHERS + 1) * k * (n - 1)),
        ("copies inside leave nothing for a second step", INSIDE, {"hierarchical": True}, (GATHERS + 1) * k * (n - 1)),
        ("MiCS, a group in each node", MICS, {}, 2 * (n - 1)),
        ("MiCS, a group over both nodes", {"shard": W}, {"hierarchical": True}, (GATHERS + 1) * (n - 1)),
        ("hpZ: backward stays inside", FLAT, {"secondary": k}, 2 * (W - k)),
        ("hpZ in two steps", FLAT, {"secondary": "node", "hierarchical": True}, 2 * (n - 1)),
    ],
)
def test_bytes_between_nodes(name: str, grid: dict[str, Any], saving: dict[str, Any], expected: float) -> None:
    assert between_nodes(grid, **saving) == pytest.approx(expected, rel=1e-12), name


def test_a_second_shard_serves_all_micro_batches_of_a_window() -> None:
    """One gather between nodes for the whole window, and a reduction for each micro-batch."""
    assert between_nodes(FLAT, accumulation=3, secondary=k) == (1 + 3) * (W - k)


def test_stage_2_reduces_and_gathers_between_nodes_once() -> None:
    assert between_nodes(FLAT, stage=2) == 2 * (W - k)
    assert between_nodes(FLAT, stage=2, hierarchical=True) == 2 * (n - 1)
