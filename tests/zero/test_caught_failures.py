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
from shardcore.comm import branches, watch
from shardcore.errors import RankFailedError
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded
from zero.models import Block
from zero.twin import largest_difference, whole_parameters

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
def test_a_rank_that_leaves_a_batch_out_goes_on_with_the_next(stage: int) -> None:
    """Its forward fails, by memory say, and is caught on that rank alone; the others never learn of it."""
    model, alone = (seeded(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))) for _ in range(2))
    mesh = sc.Mesh()
    batch = 0 if mesh.rank == 0 else 1

    def fail_once(*_: object) -> None:
        if batch == 0:
            raise MemoryError("too long")

    model[2].register_forward_pre_hook(fail_once)
    sc.shard(model, mesh, stage=stage, units=[nn.Linear])
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    for batch in range(batch, 4):  # noqa: B020  # the hook looks at it
        try:
            model(rows(batch, mesh.rank, 2, 5)).square().mean().backward()
            optimizer.step()
        except MemoryError:
            assert mesh.rank == 0
        optimizer.zero_grad()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in (1, 2, 3):
        for rank in range(2):
            (alone(rows(batch, rank, 2, 5)).square().mean() / 2).backward()
        plain.step()
        plain.zero_grad()
    assert largest_difference(whole_parameters(model), alone.state_dict())[0] < 1e-6


@spmd(world=2)
def test_a_rank_that_waits_for_one_that_has_ended_learns_it_in_any_wait() -> None:
    """Also where it waits to hear what the other has entered (ranks of different branches)."""
    mesh = sc.Mesh(device="cpu")
    if mesh.rank:
        watch.board().store.set(watch.key_of(watch.board(), "ended/1"), "{}")
        return
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 has ended its program"):
        branches.part(mesh["dp"])
    assert time.monotonic() - began < LIMIT_S


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
