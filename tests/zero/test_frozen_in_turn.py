"""Parameters that are trainable at sharding may be frozen and thawed between steps, as in adversarial training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded
from zero.models import Block
from zero.twin import largest_difference, whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
STEPS = 6
CLIP = 0.05


class Adversaries(nn.Module):
    """A generator and a discriminator, each of a few units."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(Block(), Block())
        self.d = nn.Sequential(Block(), nn.Linear(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.g(x))


Step = Callable[[str, int, int, int], torch.Tensor]


def play(model: nn.Module, optimizers: dict[str, Any], accumulation: int, ranks: list[int], finish: Any) -> None:
    """Generator and discriminator in turn, the other one frozen; ``finish(turn)`` before each update."""
    for step in range(STEPS):
        turn, other = "gd"[step % 2], "dg"[step % 2]
        getattr(model, turn).requires_grad_(True)
        getattr(model, other).requires_grad_(False)
        for rank in ranks:
            for micro in range(accumulation):
                loss = model(rows(10 * step + micro, rank, 4, 7)).float().square().mean() * (1 if turn == "d" else -1)
                (loss / accumulation / len(ranks)).backward()
        finish(turn)
        optimizers[turn].step()
        optimizers[turn].zero_grad()


def alone(accumulation: int, clip: float | None) -> nn.Module:
    """The plain loop over the rows of both ranks."""
    model = seeded(Adversaries)
    optimizers = {part: torch.optim.AdamW(getattr(model, part).parameters(), lr=1e-2, eps=1e-4) for part in "gd"}

    def finish(turn: str) -> None:
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        if clip is not None:
            nn.utils.clip_grad_norm_(getattr(model, turn).parameters(), clip)

    play(model, optimizers, accumulation, [0, 1], finish)
    return model


@pytest.mark.parametrize(
    ("accumulation", "clip", "precision"), [(1, None, "fp32"), (2, CLIP, "fp32"), (2, None, "fp16")]
)
@all_stages
@spmd(world=2)
def test_two_parts_frozen_in_turn(stage: int, accumulation: int, clip: float | None, precision: str) -> None:
    mesh = sc.Mesh()
    half = sc.Precision(param="fp16", loss_scale=64.0) if precision == "fp16" else None
    model = sc.shard(seeded(Adversaries), mesh, stage=stage, precision=half, units=[Block])
    optimizers = {
        part: sc.optimizer("adamw", list(getattr(model, part).parameters()), lr=1e-2, eps=1e-4, max_grad_norm=clip)
        for part in "gd"
    }
    play(model, optimizers, accumulation, [mesh.rank], lambda turn: None)
    found = whole_parameters(model)
    wanted = {name: param.detach() for name, param in alone(accumulation, clip).named_parameters()}
    # Sixteen bits: a parameter moves by at most lr a step, of which its rounding changes a small part.
    tolerance = 1e-6 if precision == "fp32" else 5e-3
    difference, where = largest_difference({name: value.float() for name, value in found.items()}, wanted)
    assert difference < tolerance, f"{where} is off by {difference:g}"


@all_stages
@spmd(world=2)
def test_parameters_of_one_unit_frozen_for_a_step(stage: int) -> None:
    """A frozen parameter keeps its value and moments; those beside it in its unit are trained."""

    def step(model: nn.Module, number: int, rank: int) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(number != 1 or "up" not in name)
        model(rows(number, rank, 4, 7)).square().mean().backward()

    check_follows(lambda: nn.Sequential(Block(), Block()), step, stage=stage, steps=4, units=[Block])


@all_stages
@spmd(world=2)
def test_a_part_that_one_rank_has_frozen_counts_as_zero_there(stage: int) -> None:
    def step(model: nn.Module, number: int, rank: int) -> None:
        model[0].requires_grad_(number != 1 or rank == 1)
        model(rows(number, rank, 4, 7)).square().mean().backward()

    check_follows(lambda: nn.Sequential(Block(), Block()), step, stage=stage, steps=3, units=[Block])
