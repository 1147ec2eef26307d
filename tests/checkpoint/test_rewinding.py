"""Loading into a training that has gone further, or another way, than the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import RankMismatchError
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise


def train(model: nn.Module, optimizers: list[Any], mesh: sc.Mesh, steps: range) -> dict[str, torch.Tensor]:
    """Steps on inputs of their own; the weights after them."""
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        model(inputs.to(next(model.parameters()).dtype)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return sc.state_dict(model, rank0_only=False)


def build(mesh: sc.Mesh, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return sc.shard(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), mesh, **settings)


@pytest.mark.parametrize("home", [None, "cpu", "nvme"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (sc.optim.CPUSGD, {"momentum": 0.9}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@spmd(world=2)
def test_states_from_before_the_first_step(cls: Any, options: dict[str, Any], home: str | None, tmp_path: Path) -> None:
    mesh = sc.Mesh()
    offload = sc.Offload(states=home, path=tmp_path / "disk" if home == "nvme" else None)
    model = build(mesh, stage=2, offload=offload)
    optimizer = sc.optimizer(cls, model, lr=0.05, **options)
    sc.checkpoint.save(tmp_path / "run", model, optimizer)
    first = train(model, [optimizer], mesh, range(3))
    sc.checkpoint.load(tmp_path / "run", model, optimizer, strict=False)
    assert_bitwise(train(model, [optimizer], mesh, range(3)), first)


@pytest.mark.parametrize("given", [0, 1, None])
@pytest.mark.parametrize("home", ["nvme", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_masters_of_every_optimizer_of_a_model(given: int | None, home: str, precision: str, tmp_path: Path) -> None:
    """They are saved and loaded in full, whichever optimizer's states are asked for."""
    mesh = sc.Mesh()
    offload = sc.Offload(states=home, path=tmp_path / "disk" if home == "nvme" else None, tile_numel=20)
    model = build(mesh, stage=2, precision=precision, offload=offload)
    parts = [[p for n, p in model.named_parameters() if ("bias" in n) == is_bias] for is_bias in (False, True)]
    optimizers = [sc.optimizer(torch.optim.SGD, part, lr=0.05) for part in parts]
    train(model, optimizers, mesh, range(2))
    sc.checkpoint.save(tmp_path / "run", model, None if given is None else optimizers[given])
    first = train(model, optimizers, mesh, range(2, 5))
    sc.checkpoint.load(tmp_path / "run", model, None if given is None else optimizers[given])
    masters = {name: sc.zero.full_master(param).clone() for name, param in model.named_parameters()}
    loaded = sc.state_dict(model, rank0_only=False)
    assert_bitwise({name: master.to(loaded[name].dtype) for name, master in masters.items()}, loaded)
    assert_bitwise(train(model, optimizers, mesh, range(2, 5)), first)


@pytest.mark.parametrize("different", ["optimizer", "async_", "exclude_frozen"])
@spmd(world=2)
def test_saves_that_differ_between_ranks(different: str, tmp_path: Path) -> None:
    mesh = sc.Mesh()
    model = build(mesh, stage=2)
    optimizer = sc.optimizer("adamw", model, lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "async_": False, "exclude_frozen": False}
    if mesh.rank == 1:
        options[different] = None if different == "optimizer" else True
    with pytest.raises(RankMismatchError, match=rf"what to save differs between ranks.*'{different}'"):
        sc.checkpoint.save(tmp_path, model, **options)


@pytest.mark.parametrize("different", ["optimizer", "strict", "scheduler"])
@spmd(world=2)
def test_loads_that_differ_between_ranks(different: str, tmp_path: Path) -> None:
    mesh = sc.Mesh()
    model = build(mesh, stage=2)
    optimizer = sc.optimizer("adamw", model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    sc.checkpoint.save(tmp_path, model, optimizer, scheduler=scheduler)
    options: dict[str, Any] = {"optimizer": optimizer, "strict": True, "scheduler": scheduler}
    if mesh.rank == 1:
        options[different] = False if different == "strict" else None
    with pytest.raises(RankMismatchError, match=rf"what to load differs between ranks.*'{different}'"):
        sc.checkpoint.load(tmp_path, model, **options)
    sc.checkpoint.load(tmp_path, model, optimizer, scheduler=scheduler)
