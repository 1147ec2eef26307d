"""An exception that somebody catches is no failure of the job; a rank that leaves early is one, whatever its status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Block

LATE_S = 1.3
"""Longer than ranks wait before they compare notes."""
LIMIT_S = 5.0
"""By when ranks that wait must know that another has ended."""


def stack() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(7, 3))


@pytest.mark.parametrize("stage", [0, 2, 3])
@spmd(world=2)
def test_recomputing_the_whole_model_is_no_failure(stage: int) -> None:
    """Recomputation leaves the forward by an exception as soon as it has what backward asks for."""
    rank = sc.Mesh().rank

    def play(model: nn.Module, step: int, data_rank: int) -> None:
        if step and rank == 0:
            time.sleep(LATE_S)  # the other rank looks for reports meanwhile
        checkpoint(model, rows(step, data_rank, 4, 7), use_reentrant=False).square().mean().backward()

    check_follows(stack, play, stage=stage, steps=2)


@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=2)
def test_a_caught_exception_fails_no_later_model(stage: int) -> None:
    mesh = sc.Mesh()
    broken = sc.shard(stack(), mesh, stage=stage)
    with pytest.raises(RuntimeError, match="shape"):
        broken(torch.ones(2, 5))

    def play(model: nn.Module, step: int, data_rank: int) -> None:
        if step == 0 and mesh.rank == 0:
            time.sleep(LATE_S)
        model(rows(step, data_rank, 4, 7)).square().mean().backward()

    check_follows(stack, play, stage=stage, steps=2)


PROGRAM = """
import sys, time, torch, shardcore as sc
mesh = sc.Mesh()
model = sc.shard(torch.nn.Linear(4, 4), mesh, stage=2)
optimizer = sc.optimizer("sgd", model, lr=0.1)
for step in range(4):
    if step == 2 and mesh.rank == 1:
        print(time.time(), flush=True)
        sys.exit(0)
    try:
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    except sc.errors.RankMismatchError as error:
        print(time.time(), error, flush=True)
        raise SystemExit(3)
"""


def test_a_rank_that_ends_early_is_noticed_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    job |= {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}  # no waiting for a name server
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert ranks[0].returncode == 3  # the other may be aborted at its end by gloo, with work under way
    noticed, message = said[0].split(maxsplit=1)
    assert "rank 1 has ended its program" in message
    assert float(noticed) - float(said[1]) < LIMIT_S


@pytest.mark.parametrize("stage", [0, 2, 3])
@spmd(world=2)
def test_a_forward_that_is_interrupted_leaves_nothing_behind(stage: int) -> None:
    """torch passes over the hooks of a forward that a ``KeyboardInterrupt`` leaves."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def play(model: nn.Module, step: int, data_rank: int) -> None:
        hook = model[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(rows(step, data_rank, 4, 7))
        hook.remove()
        model(rows(step, data_rank, 4, 7)).square().mean().backward()
        with torch.no_grad():
            model(rows(step, data_rank, 4, 7))

    check_follows(stack, play, stage=stage)


class Reluctant(nn.Linear):
    """Has a part of its state that cannot always be had."""

    is_broken = False

    def get_extra_state(self) -> str:
        if self.is_broken:
            raise ValueError("not now")
        return "there"

    def set_extra_state(self, state: str) -> None:
        """Nothing to set."""


@spmd(world=2)
def test_a_state_dict_after_one_that_failed_is_that_of_now() -> None:
    model = sc.shard(nn.Sequential(Reluctant(4, 4), nn.Linear(4, 4)), stage=3)
    optim = sc.optimizer("sgd", model, lr=0.1)
    model[0].is_broken = True
    with pytest.raises(ValueError, match="not now"):
        model.state_dict()
    model[0].is_broken = False
    model(torch.ones(2, 4)).square().mean().backward()
    optim.step()
    saved = sc.state_dict(model, rank0_only=False)
    with sc.summon(model):
        assert all(torch.equal(saved[name], param) for name, param in model.named_parameters())
