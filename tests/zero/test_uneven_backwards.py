"""Ranks that make different numbers of backwards in a step, or drop gradients alone: an error on all, never a hang."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import RankMismatchError
from shardcore.testing import SpmdError, run_spmd, spmd
from zero.following import rows
from zero.models import Block

LIMIT_S = 10.0


def train(stage: int, usual: int, odd_step: int, odd: int) -> tuple[int, str]:
    """``usual`` backwards a step, but ``odd`` in one step of rank 1. Returns how many were made, and the error."""
    mesh = sc.Mesh()
    model = sc.shard(nn.Sequential(Block(), nn.Linear(7, 3)), mesh, stage=stage, units=[Block])
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    began = time.monotonic()
    for step in range(4):
        try:
            for _ in range(odd if step == odd_step and mesh.rank == 1 else usual):
                model(rows(step, mesh.rank, 4, 7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except RankMismatchError as error:  # caught, so that a rank which hangs is not freed by the end of the other
            assert time.monotonic() - began < LIMIT_S
            return step, str(error)
    return 4, ""


@pytest.mark.parametrize(("usual", "odd_step", "odd"), [(1, 0, 2), (1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_different_numbers_of_backwards_are_an_error_on_all_ranks(
    stage: int, usual: int, odd_step: int, odd: int
) -> None:
    for num_steps, message in run_spmd(train, 2, stage, usual, odd_step, odd):
        # Stage 1 reduces what is too much at the step's end; ranks part in the next, at the backward that reduces.
        assert num_steps == odd_step + (stage == 1 and odd > usual), message
        assert "left the common order of collectives" in message
        assert "'all-reduce gradient flags" in message


def clear_on_rank_1(stage: int) -> None:
    mesh = sc.Mesh()
    model = sc.shard(nn.Sequential(Block(), nn.Linear(7, 3)), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model(torch.ones(2, 7)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 7)).mean().backward()
    if mesh.rank == 1:
        optimizer.zero_grad()
    optimizer.step()


def test_zero_grad_of_reduced_gradients_on_one_rank() -> None:
    for stage in (0, 1, 2, 3):
        with pytest.raises(SpmdError, match="zero_grad of gradients that were reduced"):
            run_spmd(clear_on_rank_1, 2, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_zero_grad_of_nothing_on_one_rank(stage: int) -> None:
    model = sc.shard(nn.Sequential(Block(), nn.Linear(7, 3)), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model(torch.ones(2, 7)).mean().backward()
    sc.reset_iteration(model)
    for _ in range(2):
        if sc.Mesh().rank == 1:
            optimizer.zero_grad()
        model(torch.ones(2, 7)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
