"""Overflow, 16-bit sums, buffers and dropout: faults of numerics, by their names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import shardcore as sc
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Block, Vector
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Overflowing(nn.Module):
    """Gives an infinite gradient on one rank when told to; has a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return ((self.weight * x).sum(-1) * factor).mean()


@all_stages
@spmd(world=2)
def test_b37_skipped_steps_leave_nothing_behind(stage: int) -> None:
    mesh = sc.Mesh()
    precision = sc.Precision(param="fp16", loss_scale="dynamic")
    model = sc.shard(Overflowing(), mesh, stage=stage, precision=precision)
    scale = sc.optim.DynamicScale(scale=8.0, hysteresis=1)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1, max_grad_norm=1.0, loss_scale=scale)
    master = torch.ones(6).requires_grad_()
    plain = torch.optim.AdamW([master], lr=0.1)
    for step, good in enumerate((True, False, True, False, False, True)):
        for micro in range(2):
            factor = math.inf if not good and micro == 1 and mesh.rank == 1 else 0.5
            model(torch.full((1, 6), step + 1.0), factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_applied == good
        if good:
            master.grad = torch.full((6,), step + 1.0)
            torch.nn.utils.clip_grad_norm_([master], 1.0)
            plain.step()
    found = whole_parameters(model)
    assert found["unused"].tolist() == [1.0] * 3
    torch.testing.assert_close(found["weight"].float(), master.detach(), rtol=2e-3, atol=2e-3)
    assert optimizer.num_skipped_steps == 3
    assert scale.scale == 1.0


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_n2_n3_one_infinite_gradient_on_one_rank(stage: int, precision: str) -> None:
    """With the check on (the default for 16-bit parameters) the step is skipped everywhere, and states stay finite."""
    mesh = sc.Mesh()
    asked = sc.Precision(param=precision, skip_nonfinite=True if precision == "fp32" else None)
    model = sc.shard(Overflowing(), mesh, stage=stage, precision=asked)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
    for step in range(3):
        model(torch.ones(1, 6), math.inf if step == 1 and mesh.rank == 0 else 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_applied == (step != 1)
    assert (optimizer.num_steps, optimizer.num_skipped_steps) == (2, 1)
    assert torch.isfinite(whole_parameters(model)["weight"]).all()
    for state in optimizer.inner.state.values():
        assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_n6_small_16_bit_gradients_add_up_in_fp32(stage: int) -> None:
    """1 + 256 x 2^-9 is 1.5; summed in bf16 it would stay 1."""
    model = sc.shard(Vector(2), stage=stage, precision=sc.Precision(param="bf16"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
    for value in [1.0] + [2.0**-9] * 256:
        model(torch.full((1, 2), value)).mean().backward()
    optimizer.step()
    assert whole_parameters(model)["weight"].tolist() == [-1.5, -1.5]


@all_stages
@spmd(world=2)
def test_n7_buffers_keep_their_dtype(stage: int) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("position", torch.tensor([4097.0]))
    model.register_buffer("count", torch.tensor([7]))
    sc.shard(model, stage=stage, precision=sc.Precision(param="bf16"))
    assert (model.position.dtype, model.position.item()) == (torch.float32, 4097.0)
    assert (model.count.dtype, model.count.item()) == (torch.int64, 7)
    assert model.weight.dtype == torch.bfloat16


class Dropping(nn.Module):
    """A block with dropout, recomputed if asked."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@all_stages
@spmd(world=2)
def test_n8_recomputation_draws_the_same_dropout(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        torch.manual_seed(100 * step + rank)
        model(rows(step, rank, 4, 7).requires_grad_()).square().mean().backward()

    def without(model: nn.Module, step: int, rank: int) -> None:
        model.recompute = False  # type: ignore[assignment]
        play(model, step, rank)

    check_follows(lambda: Dropping(recompute=True), play, stage=stage, reference_play=without)
