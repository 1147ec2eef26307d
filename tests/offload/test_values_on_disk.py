"""States and masters of single parameters on a disk: read and set as on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardcore as sc
from offload.homes import train_steps
from shardcore.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise
from zero.following import seeded
from zero.models import ZOO
from zero.twin import whole_parameters

NAMES = ("exp_avg", "exp_avg_sq", "step")


def make(
    mesh: sc.Mesh, stage: int, folder: Path | None, precision: str = "bf16"
) -> tuple[nn.Module, sc.optim.ShardedOptimizer]:
    """A model with parts that are never used, and its optimizer; on a disk where a folder is given."""
    offload = None if folder is None else sc.Offload(states="nvme", path=folder, tile_numel=37)
    model = sc.shard(
        seeded(ZOO["unused"].build), mesh, stage=stage, precision=sc.Precision(param=precision), offload=offload
    )
    return model, sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2)


def look(model: nn.Module) -> list[object]:
    """Everything that single parameters show."""
    seen: list[object] = []
    for name, param in model.named_parameters():
        seen.append((name, sc.zero.full_master(param), sc.zero.local_master(param)))
        for state in NAMES:
            seen.extend((sc.optim.full_state(param, state), sc.optim.local_state(param, state)))
    return seen


def change(model: nn.Module, mesh: sc.Mesh) -> None:
    """Set states and masters, whole and in pieces, to values that 16 bits do not hold."""
    for number, param in enumerate(model.parameters()):
        if sc.optim.full_state(param, "exp_avg") is None or not param.numel():
            continue
        values = torch.linspace(0.1, 0.2, param.numel()).view(param.shape) + number / 7
        if number % 2:
            sc.optim.set_full_state(param, "exp_avg", values / 3)
            sc.optim.set_full_state(param, "step", torch.tensor(5.0 + number))
            sc.zero.set_full_master(param, values)
            continue
        start, piece = 1.0 + mesh.rank, sc.zero.local_master(param)
        if sc.optim.local_state(param, "exp_avg_sq") is not None:
            sc.optim.set_local_state(param, "exp_avg_sq", torch.linspace(start, start + 1 / 3, piece.numel()))
        sc.zero.set_local_master(param, torch.linspace(start / 3, start / 2, piece.numel()))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@spmd(world=2)
def test_a_disk_shows_what_the_device_shows(stage: int, precision: str, tmp_path: Path) -> None:
    mesh = sc.Mesh()
    pairs = [make(mesh, stage, folder, precision) for folder in (None, tmp_path)]
    for steps in (range(0), range(2), range(2, 4)):
        for model, optimizer in pairs:
            train_steps(model, optimizer, mesh, steps)
        assert_bitwise(look(pairs[1][0]), look(pairs[0][0]))
    for model, _ in pairs:
        change(model, mesh)
    assert_bitwise(look(pairs[1][0]), look(pairs[0][0]))
    assert_bitwise(whole_parameters(pairs[1][0]), whole_parameters(pairs[0][0]))
    for model, optimizer in pairs:
        train_steps(model, optimizer, mesh, range(4, 6))
    assert_bitwise(whole_parameters(pairs[1][0]), whole_parameters(pairs[0][0]))


@spmd(world=1)
def test_reading_does_not_wait_for_the_next_step_to_see_edits(tmp_path: Path) -> None:
    """Nor does it need a step, or an optimizer."""
    offload = sc.Offload(states="nvme", path=tmp_path, tile_numel=37)
    model = sc.shard(seeded(ZOO["odd"].build), stage=2, offload=offload, precision=sc.Precision(param="bf16"))
    bias = model.head.bias
    assert torch.equal(safe_get_full_fp32_param(bias), bias.detach().float())
    optimizer = sc.optimizer(sc.optim.CPUAdamW, model, lr=1e-2)
    assert torch.equal(safe_get_full_fp32_param(bias), bias.detach().float())
    assert safe_get_full_optimizer_state(bias, "exp_avg") is None
    train_steps(model, optimizer, sc.Mesh(), range(2))
    master = safe_get_full_fp32_param(bias)
    assert torch.equal(master.bfloat16(), bias.detach())
    assert not torch.equal(master, bias.detach().float())
    with torch.no_grad():
        bias[0] = 3.0
    edited = safe_get_full_fp32_param(bias)
    assert edited[0] == 3.0
    assert torch.equal(edited[1:], master[1:])


@spmd(world=1)
def test_wrong_names_and_sizes_are_refused(tmp_path: Path) -> None:
    model, optimizer = make(sc.Mesh(), 2, tmp_path)
    weight = model.head.weight
    with pytest.raises(StateError, match="before its first update"):
        sc.optim.set_full_state(weight, "exp_avg", torch.zeros(3, 7))
    train_steps(model, optimizer, sc.Mesh(), range(1))
    before = look(model)
    with pytest.raises(ConfigError, match="keeps no state 'momentum'; it has exp_avg, exp_avg_sq, step"):
        sc.optim.full_state(weight, "momentum")
    with pytest.raises(ConfigError, match="has 21 elements, got 20"):
        sc.optim.set_local_state(weight, "exp_avg", torch.zeros(20))
    with pytest.raises(ConfigError, match="this rank's piece"):
        sc.zero.set_local_master(weight, torch.zeros(20))
    assert_bitwise(look(model), before)
