"""Bytes per rank equal the formula: between steps, and at the peak of a step.

Counted are all live storages of the process, each once, less what was there before the model: parameters, masters,
gradients, optimizer states, reduction buffers and gather buffers, and gradients in autograd's hands. Batches are of one
row, so that activations are small against a bucket. N is the number of parameters, d the number of ranks.

Between steps no gradient lives where gradients are sharded (they are dropped by ``zero_grad``); before ``zero_grad`` the
reduced shards do, which is the moment the formula describes.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.protocols import find_root
from shardcore.testing import PeakTensorBytes, spmd, tensor_bytes

WIDTH, NUM_BLOCKS = 256, 24
UNIT_NUMEL = WIDTH * WIDTH + WIDTH
NUMEL = NUM_BLOCKS * UNIT_NUMEL


def formula(stage: int, precision: str, world: int) -> float:
    """Bytes per rank while gradients live: parameters + gradients + states (16-bit: fp32 masters among them)."""
    n, d = NUMEL, world
    if precision == "fp32":
        return {0: 16 * n, 1: 8 * n + 8 * n / d, 2: 4 * n + 12 * n / d, 3: 16 * n / d}[stage]
    return {0: 18 * n, 1: 6 * n + 12 * n / d, 2: 2 * n + 16 * n / d, 3: 18 * n / d}[stage]


class Layer(nn.Linear):
    """A unit of its own, all of equal size."""


def trained_model(stage: int, precision: str) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))
    asked = sc.Precision(param=None if precision == "fp32" else precision)
    sc.shard(model, stage=stage, precision=asked, units=[Layer])
    optimizer = sc.optimizer(torch.optim.Adam, model, lr=1e-3)
    return model, optimizer, torch.ones(1, WIDTH)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=[2, 4])
def test_bytes_between_steps_and_at_peak_equal_the_formula(stage: int, precision: str, world: int) -> None:
    before = tensor_bytes(collect=True)
    model, optimizer, x = trained_model(stage, precision)
    for _ in range(2):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    with PeakTensorBytes() as peak:
        model(x).float().square().mean().backward()
        optimizer.step()
        gc.collect()
        resting = tensor_bytes() - before
        optimizer.zero_grad()
    root: Any = find_root(model)
    assert sum(group.full.numel() for group in root.groups) <= 1.01 * NUMEL, "padding would blur the count"
    expected = formula(stage, precision, world)
    bucket = 4 * UNIT_NUMEL  # one unit's gradients in fp32
    if stage in (1, 2):
        root.window.finish  # noqa: B018  (the gather of updated parameters is in flight: parameters are whole already)
    assert abs(resting - expected) <= 0.02 * expected, f"between steps {resting / expected:.3f} x the formula"
    most = 1.02 * expected + bucket
    at_peak = peak.peak_nbytes - before
    assert at_peak <= most, (
        f"peak {at_peak / expected:.3f} x the formula, {(at_peak - expected) / bucket:.2f} buckets above it, at {peak.peak_operation}"
    )
