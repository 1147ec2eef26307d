"""States of which a part is offloaded: the device updates the others, in the same step."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import shardcore as sc
from offload.homes import train_steps
from shardcore.offload import ShardSpec, place_shards
from shardcore.protocols import find_root
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise
from zero.following import seeded
from zero.models import ZOO
from zero.twin import whole_parameters

BF16, HALF = sc.Precision(param="bf16"), sc.Offload(states="cpu", ratio=0.5)
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16])
@spmd(world=2)
def test_each_half_is_what_its_kernel_gives(stage: int, precision: sc.Precision | None) -> None:
    """Against two optimizers of a model on the device: torch's over one half, the CPU's over the other."""
    mesh = sc.Mesh()
    split = sc.shard(seeded(ZOO["unused"].build), mesh, stage=stage, precision=precision, offload=HALF)
    plain = sc.shard(seeded(ZOO["unused"].build), mesh, stage=stage, precision=precision)
    there = {slot.name for group in find_root(split).groups if group.updates_on_host for slot in group.slots}
    named = dict(plain.named_parameters())
    assert 0 < len(there) < len(named)
    optimizer = sc.optimizer(torch.optim.AdamW, split, **ADAMW)
    on_device = sc.optimizer(torch.optim.AdamW, [named[name] for name in named if name not in there], **ADAMW)
    on_host = sc.optimizer(sc.optim.CPUAdamW, [named[name] for name in named if name in there], **ADAMW)
    for step in range(5):
        for group in optimizer.param_groups + on_device.param_groups + on_host.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        train_steps(split, optimizer, mesh, range(step, step + 1))
        on_host.zero_grad()
        train_steps(plain, Both(on_device, on_host), mesh, range(step, step + 1))
    assert_bitwise(whole_parameters(split), whole_parameters(plain))


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(("before", "after"), [(0.5, 1.0), (1.0, 0.5), (0.5, 0.5), (0.5, 0.0)])
@spmd(world=2)
def test_a_state_loads_at_any_ratio(before: float, after: float) -> None:
    """Also in a model of which a part was never updated, and after pieces were cut."""
    mesh = sc.Mesh()

    def make(ratio: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        offload = sc.Offload(states="cpu", ratio=ratio)
        model = sc.shard(seeded(ZOO["unused"].build), mesh, stage=2, offload=offload, precision=BF16)
        return model, sc.optimizer(torch.optim.AdamW, model, **ADAMW)

    model, optimizer = make(before)
    train_steps(model, optimizer, mesh, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), whole_parameters(model)
    resumed, other = make(after)
    resumed.load_state_dict(weights)
    other.load_state_dict(saved)
    for each, its in ((model, optimizer), (resumed, other)):
        train_steps(each, its, mesh, range(3, 6))
    if before == after:
        assert_bitwise(whole_parameters(resumed), whole_parameters(model))
    # Two kernels' roundings, in bf16.
    torch.testing.assert_close(whole_parameters(resumed), whole_parameters(model), rtol=1e-2, atol=1e-3)


@spmd(world=1)
def test_a_part_is_as_near_as_groups_come() -> None:
    """And takes host memory for that part alone."""
    draw = random.Random(0)
    for _ in range(50):
        ratio = draw.random()
        sizes = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 40))]
        specs = [
            ShardSpec(numel=numel, param=torch.bfloat16, master=torch.float32, grad=torch.float32, trainable=True)
            for numel in sizes
        ]
        offload = sc.Offload(states="cpu", grads="cpu", ratio=ratio, pin=False)
        found = place_shards(offload, specs, torch.device("cpu"), sc.Mesh()["dp"])
        there = sum(numel for numel, memory in zip(sizes, found, strict=True) if memory.updates_on_host)
        assert abs(there - ratio * sum(sizes)) <= max(sizes) / 2
        for memory in found:
            assert (memory.master is not None) == (memory.grad is not None) == memory.updates_on_host
