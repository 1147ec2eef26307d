"""The engine is sugar: for every recipe its loop and the hand-written one give the same parameters, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

import shardcore as sc
from engine.loops import by_engine, by_hand, config
from shardcore.testing import run_spmd, spmd, twin

RECIPES = list(itertools.product((0, 1, 2, 3), (1, 4), ("fp32", "bf16", "fp16")))
SAMPLE = {(0, 4, "fp32"), (1, 4, "bf16"), (2, 1, "fp16"), (3, 4, "fp32")}


@pytest.mark.parametrize(
    ("stage", "accumulation", "precision"),
    [pytest.param(*r, marks=() if r in SAMPLE else pytest.mark.full) for r in RECIPES],
)
@spmd(world=2)
def test_engine_loop_equals_hand_loop(stage: int, accumulation: int, precision: str) -> None:
    mesh = sc.Mesh(device="cpu")
    mode = {} if precision == "fp32" else {precision: {"enabled": True}}
    asked = sc.Precision(param=None if precision == "fp32" else precision)
    engine = by_engine("tiny_gpt", mesh, config(stage, accumulation, **mode), 4)
    plain = by_engine("tiny_gpt", mesh, config(stage, accumulation, **mode), 4, plain=True)
    hand = by_hand("tiny_gpt", mesh, stage, 4, accumulation, asked)
    twin.assert_bitwise(plain, engine)
    twin.assert_bitwise(engine, hand)


@spmd(world=2)
def test_a_hand_loop_without_no_sync_learns_the_window() -> None:
    """Stage 1 reduces once per window, as the engine does, though nobody tells it which backward is the last."""
    mesh = sc.Mesh(device="cpu")
    model = sc.shard(torch.nn.Linear(8, 8), mesh, stage=1)
    optim = sc.optimizer("sgd", model, lr=0.1)
    calls = []
    for _ in range(4):
        sc.comm.reset_traffic()
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        optim.step()
        optim.zero_grad()
        calls.append(sc.comm.traffic()["reduce.calls"])
    assert calls == [1, 1, 1, 1]


def test_world_one_needs_no_launcher() -> None:
    for stage in range(4):
        run_spmd(_train_alone, 1, stage, init=False)


def _train_alone(stage: int) -> None:
    assert not torch.distributed.is_initialized()
    mesh = sc.Mesh(device="cpu")
    twin.assert_bitwise(by_engine("odd", mesh, config(stage), 3), by_hand("odd", mesh, stage, 3, 1))
    assert not torch.distributed.is_initialized()
