"""The homes of states that trainings are compared between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardcore as sc
from zero.models import ZOO, rows_of
from zero.twin import OPTIMIZERS, Recipe, Trained, train_sharded

KERNEL = "cpu adamw"
OPTIMIZERS[KERNEL] = (sc.optim.CPUAdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4})
OPTIMIZERS["rmsprop"] = (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-4, "momentum": 0.5})

HOMES: dict[str, dict[str, Any]] = {
    "states": {"states": "cpu"},
    "states and gradients": {"states": "cpu", "grads": "cpu"},
    "disk": {"states": "nvme"},
    "disk, small tiles": {"states": "nvme", "grads": "cpu", "tile_numel": 37, "num_tiles": 3},
    "parameters": {"params": "cpu"},
    "disk and parameters": {"params": "cpu", "states": "nvme", "tile_numel": 100, "num_tiles": 1},
    "parameters on disk": {"params": "nvme", "host_param_nbytes": 0},
    "all on disk": {"params": "nvme", "states": "nvme", "grads": "cpu", "tile_numel": 100, "host_param_nbytes": 4096},
    "parameters on disk, states in memory": {"params": "nvme", "states": "cpu"},
    "half of the states": {"states": "cpu", "ratio": 0.5},
    "half of all": {"params": "cpu", "states": "cpu", "grads": "cpu", "ratio": 0.5},
    "everything": {"params": "cpu", "states": "cpu", "grads": "cpu"},
}


def homes_of(stage: int) -> list[str]:
    """The homes that a stage has: parameters leave the device at stage 3 alone."""
    return [name for name, home in HOMES.items() if stage == 3 or "params" not in home]


def offload_of(home: str | None, folder: Path | str) -> sc.Offload | None:
    """The settings of a home; disks are in ``folder``."""
    if home is None:
        return None
    settings = HOMES[home]
    return sc.Offload(**settings, path=folder if "nvme" in settings.values() else None)


def train(recipe: Recipe, mesh: sc.Mesh, home: str | None, folder: Path | str = "") -> Trained:
    """Train with states at ``home``; None leaves them on the device. Collective."""
    return train_sharded(recipe, mesh, offload=offload_of(home, folder))


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: sc.Mesh, steps: range) -> None:
    """Steps on the batches of the model "odd", which "unused" takes too."""
    for step in steps:
        batch = rows_of(ZOO["odd"].batch(step, 0), mesh.data_rank, mesh.data_world)
        ZOO["odd"].loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
