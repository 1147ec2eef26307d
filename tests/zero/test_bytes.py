"""Bytes per rank equal the formula: between steps, and at the peak of a step.

Counted are all live storages of the process, each once, less what was there before the model: parameters, masters,
gradients, optimizer states, the buffers of reductions and gathers, and gradients in autograd's hands. Batches are of
one row, and the row that autograd saves for each unit is taken off at the peak; the optimizer is fused, so that it has
no temporaries of its own. N is the number of parameters, d the number of ranks; gradients live from backward to
``zero_grad``, so "between steps" is taken before ``zero_grad``.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.protocols import find_root
from shardcore.testing import PeakTensorBytes, run_spmd, spmd, tensor_bytes

pytestmark = pytest.mark.full  # minutes of sampling every operation

WIDTH, NUM_BLOCKS = 128, 160
UNIT_NUMEL = WIDTH * WIDTH
NUMEL = NUM_BLOCKS * UNIT_NUMEL
BUCKET_NBYTES = 4 * UNIT_NUMEL
"""One unit's gradients in fp32."""


def formula(stage: int, precision: str, world: int) -> float:
    """Bytes per rank while gradients live: parameters + gradients + states (16-bit: fp32 masters among them)."""
    n, d = NUMEL, world
    if precision == "fp32":
        return {0: 16 * n, 1: 8 * n + 8 * n / d, 2: 4 * n + 12 * n / d, 3: 16 * n / d}[stage]
    return {0: 18 * n, 1: 6 * n + 12 * n / d, 2: 2 * n + 16 * n / d, 3: 18 * n / d}[stage]


class Layer(nn.Linear):
    """A unit of its own, all of equal size."""


def trained_model(
    stage: int, precision: str, num_blocks: int = NUM_BLOCKS, budget: int | None = None
) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(num_blocks)))
    asked = sc.Precision(param=None if precision == "fp32" else precision)
    sc.shard(model, stage=stage, precision=asked, units=[Layer], budget=budget)
    optimizer = sc.optimizer(torch.optim.Adam, model, lr=1e-3, fused=True)
    return model, optimizer, torch.ones(1, WIDTH)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "world"),
    [
        ("fp32", 2),
        ("bf16", 4),
        pytest.param("fp32", 4, marks=pytest.mark.full),
        pytest.param("bf16", 2, marks=pytest.mark.full),
    ],
)
def test_bytes_between_steps_and_at_peak_equal_the_formula(stage: int, precision: str, world: int) -> None:
    run_spmd(check_bytes, world, stage, precision, world)


def check_bytes(stage: int, precision: str, world: int) -> None:
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
    assert abs(resting - expected) <= 0.02 * expected, f"between steps {resting / expected:.3f} x the formula"
    at_peak = peak.peak_nbytes - before - NUM_BLOCKS * WIDTH * (4 if precision == "fp32" else 2)  # saved inputs
    if stage == 3:
        at_peak -= 2 * UNIT_NUMEL * (4 if precision == "fp32" else 2)  # the unit in use, and the next one on its way
    above = (at_peak - expected) / BUCKET_NBYTES
    assert at_peak <= 1.02 * expected + BUCKET_NBYTES, f"peak {above:.2f} buckets above, at {peak.peak_operation}"


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=4)
def test_the_working_memory_of_a_step_is_a_few_units(stage: int) -> None:
    """Above what rests: the unit whose gradients come in, the one being reduced with what it receives, and the gradient
    in autograd's hands; at stage 3 also the unit in use and the next. It does not grow with the number of units."""
    model, optimizer, x = trained_model(stage, "fp32")
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    with PeakTensorBytes() as peak:
        resting = tensor_bytes()
        model(x).square().mean().backward()
        if stage > 1:
            optimizer.step()
    units = {1: NUM_BLOCKS + 2, 2: 4, 3: 6}[stage]
    assert peak.peak_nbytes - resting <= (units + 0.1) * BUCKET_NBYTES + 2 * 4 * WIDTH * NUM_BLOCKS


@pytest.mark.parametrize("budget_units", [1, 2, 3, 8, 24])
@pytest.mark.parametrize(("precision", "world"), [("fp32", 2), ("fp32", 4), ("bf16", 2)])
def test_the_peak_of_stage_3_is_its_shards_and_the_budget_and_a_bucket(
    precision: str, world: int, budget_units: int
) -> None:
    """A bucket is what a unit's reduction takes: the gradients that come in, those on their way with what arrives of
    the other ranks', and the gradient in autograd's hands. Activations are the inputs that autograd saves."""
    run_spmd(check_budget, world, precision, budget_units)


def check_budget(precision: str, budget_units: int) -> None:
    num_blocks, itemsize = 24, 4 if precision == "fp32" else 2
    budget = budget_units * UNIT_NUMEL * itemsize
    before = tensor_bytes(collect=True)
    model, optimizer, x = trained_model(3, precision, num_blocks, budget)
    for _ in range(3):  # the first is on demand, the plan begins at the second
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    with PeakTensorBytes() as peak:
        model(x).float().square().mean().backward()
        optimizer.step()
    shards = formula(3, precision, sc.Mesh().world) * num_blocks / NUM_BLOCKS
    activations = num_blocks * WIDTH * itemsize
    above = (peak.peak_nbytes - before - shards - activations - budget) / BUCKET_NBYTES
    assert above <= 4.0, f"{above:.2f} units of gradients above, at {peak.peak_operation}"
