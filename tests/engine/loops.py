"""The engine's loop and the same training written by hand."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

import shardcore as sc
from shardcore.testing import zoo

MICRO_BATCH = 4


class WithLoss(nn.Module):
    """A model of the zoo that returns its loss, in fp32: there a loss scale enters at the same place in every loop."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = zoo.build(name)

    def forward(self, batch: zoo.Batch) -> torch.Tensor:
        """The mean loss of a batch."""
        return zoo.loss(self.model, batch)


def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A DeepSpeed-style configuration with AdamW, clipping and a warm-up."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        **more,
    }


def batches(name: str, mesh: sc.Mesh, step: int, accumulation: int) -> list[zoo.Batch]:
    """This rank's micro-batches of a step; joined over ranks they are the same for every world size that divides."""
    world = mesh.data_world
    whole = zoo.batch(name, step, MICRO_BATCH * accumulation * world)
    return [zoo.rank_slice(part, mesh.data_rank, world) for part in _split(whole, accumulation)]


def by_engine(name: str, mesh: sc.Mesh, settings: dict[str, Any], steps: int, *, plain: bool = False) -> dict[str, Any]:
    """Train through ``initialize``; ``plain`` calls ``loss.backward()`` instead of ``engine.backward(loss)``."""
    before = copy.deepcopy(settings)
    engine, _, _, _ = sc.initialize(model=WithLoss(name), config=settings, mesh_param=mesh)
    assert settings == before, "the configuration is the caller's and is not changed"
    for step in range(steps):
        for batch in batches(name, mesh, step, engine.gradient_accumulation_steps()):
            loss = engine(batch)
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
    return result(engine.module, engine.get_global_grad_norm())


def by_hand(
    name: str, mesh: sc.Mesh, stage: int, steps: int, accumulation: int, precision: sc.Precision | None = None
) -> dict[str, Any]:
    """The same training over the composable functions."""
    model = sc.shard(WithLoss(name), mesh, stage=stage, precision=precision)
    optim = sc.optimizer(torch.optim.AdamW, model, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    for step in range(steps):
        micro_batches = batches(name, mesh, step, accumulation)
        for batch in micro_batches[:-1]:
            with sc.no_sync(model) if stage < 2 else contextlib.nullcontext():
                (model(batch) / accumulation).backward()
        (model(micro_batches[-1]) / accumulation).backward()
        optim.step()
        optim.zero_grad()
    return result(model, optim.grad_norm)


def result(model: nn.Module, norm: float | None) -> dict[str, Any]:
    """Whole parameters and the last norm."""
    return {"norm": norm, **sc.state_dict(model, rank0_only=False)}


def _split(batch: zoo.Batch, num_parts: int) -> list[zoo.Batch]:
    return [zoo.rank_slice(batch, part, num_parts) for part in range(num_parts)]
