"""Trainings that go on in new processes, and loads in the middle of a training, under the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore import testing
from shardcore.testing import run_spmd, spmd
from shardcore.testing.twin import assert_bitwise

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WIDTH = 6


class Dropped(nn.Module):
    """A residual stack with dropout, whose forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x).tanh(), 0.3)
        return x.float().square().mean()


def engine(stage: int, seed: int) -> sc.Engine:
    """fp16 with a scale that doubles every third step, AdamW, a warm-up that turns into a cosine."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 3}},
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(seed)
    made = sc.initialize(model=Dropped(), config=settings)[0]
    torch.manual_seed(100 * seed + made.global_rank)
    return made


def train(made: sc.Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + made.global_rank)
        loss = made(torch.randn(4, WIDTH, generator=generator))
        made.backward(loss)
        made.step()
        losses.append(float(loss.detach()))
    return losses


def result(made: sc.Engine) -> dict[str, Any]:
    """Everything that a training has by now, of this rank."""
    assert made.optimizer is not None
    saved = made.optimizer.state_dict()
    return {
        "weights": sc.state_dict(made.module, rank0_only=False),
        "masters and moments": copy.deepcopy(saved["state"]),
        "scale": saved["loss_scale"],
        "lr": made.get_lr(),
        "counts": (made.global_steps, made.skipped_steps, made.global_samples),
    }


def straight(stage: int) -> tuple[list[float], dict[str, Any]]:
    made = engine(stage, seed=1)
    return train(made, 0, 10), result(made)


def first_half(stage: int, folder: str) -> list[float]:
    made = engine(stage, seed=1)
    losses = train(made, 0, 5)
    made.save_checkpoint(folder)
    return losses


def second_half(stage: int, folder: str) -> tuple[list[float], dict[str, Any]]:
    made = engine(stage, seed=2)
    made.load_checkpoint(folder)
    return train(made, 5, 10), result(made)


@all_stages
def test_n9_a_training_that_goes_on_in_new_processes_is_the_uninterrupted_one_to_the_last_bit(
    stage: int, tmp_path: Path
) -> None:
    expected = run_spmd(straight, 2, stage)
    before = run_spmd(first_half, 2, stage, str(tmp_path))
    testing.shutdown()
    after = run_spmd(second_half, 2, stage, str(tmp_path))
    for (losses, values), head, (tail, found) in zip(expected, before, after, strict=True):
        assert head + tail == losses
        assert_bitwise(found, values)


@all_stages
@spmd(world=2)
def test_c19_a_load_in_mid_training_can_be_saved_at_once_and_trained_on(stage: int, tmp_path: Path) -> None:
    made = engine(stage, seed=1)
    train(made, 0, 2)
    made.save_checkpoint(tmp_path, tag="old")
    old = result(made)
    train(made, 2, 4)
    made.load_checkpoint(tmp_path, tag="old")
    made.save_checkpoint(tmp_path, tag="again")
    other = engine(stage, seed=2)
    other.load_checkpoint(tmp_path, tag="again")
    assert_bitwise(result(other), old)
    resumed = engine(stage, seed=3)
    resumed.load_checkpoint(tmp_path, tag="old")
    expected = train(resumed, 2, 4)
    made.load_checkpoint(tmp_path, tag="old")
    assert train(made, 2, 4) == expected
    assert_bitwise(result(made), result(resumed))
