"""The same training step by every library: ``build(arm, ...)`` gives a function that takes a batch and makes one step.

A model has its repeated units in ``model.blocks``.

Each arm is written as its library's own documentation writes it, with the options that make it fastest here.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

ARMS = ("shardcore-1", "shardcore-2", "shardcore-3", "ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3")
EXTRA_ARMS = ("shardcore-0",)
OPTIMIZER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

Step = Callable[["torch.Tensor"], "torch.Tensor"]
"""A batch -> this rank's mean loss, detached."""

Loss = Callable[[Callable[["torch.Tensor"], "torch.Tensor"], "torch.Tensor"], "torch.Tensor"]
"""(model, batch) -> this rank's mean loss."""


def is_available(arm: str) -> bool:
    """Whether the arm's library is installed; torch and shardcore always are."""
    return not arm.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


def build(
    arm: str, model: nn.Module, micro_batch: int, *, loss: Loss | None = None, zero: dict[str, Any] | None = None
) -> Step:
    """Shard or wrap ``model`` (changed in place) as the arm does. Collective over all ranks.

    Args:
        loss: what is minimised; by default ``next_token_loss``.
        zero: more keys of DeepSpeed's ``zero_optimization``.
    """
    loss = loss or next_token_loss
    library, _, stage = arm.partition("-")
    if library == "shardcore":
        return _shardcore(model, int(stage), loss)
    if library == "deepspeed":
        return _deepspeed(model, deepspeed_config(int(stage), micro_batch, zero), loss)
    return {"plain": _plain, "ddp": _ddp, "fsdp2": _fsdp2}[library](model, loss)


def next_token_loss(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Mean nats per token: int64 [batch, time + 1] -> scalar."""
    from torch.nn import functional as F

    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _shardcore(model: nn.Module, stage: int, loss: Loss) -> Step:
    import torch

    import shardcore as sc

    sc.shard(model, sc.Mesh(device="cpu"), stage=stage, units=[type(model.blocks[0])])
    return partial(_step, model, sc.optimizer(torch.optim.AdamW, model, **OPTIMIZER), loss)


def _plain(model: nn.Module, loss: Loss) -> Step:
    """No library: every rank trains alone. What the others take longer is what sharding costs."""
    import torch

    _init_gloo()
    return partial(_step, model, torch.optim.AdamW(model.parameters(), **OPTIMIZER), loss)


def _ddp(model: nn.Module, loss: Loss) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    _init_gloo()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return partial(_step, wrapped, torch.optim.AdamW(wrapped.parameters(), **OPTIMIZER), loss)


def _fsdp2(model: nn.Module, loss: Loss) -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _init_gloo()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return partial(_step, model, torch.optim.AdamW(model.parameters(), **OPTIMIZER), loss)


def _deepspeed(model: nn.Module, config: dict[str, Any], loss_of: Loss) -> Step:
    prepare_deepspeed()
    import torch

    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **OPTIMIZER),
        config=config,
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def deepspeed_config(stage: int, micro_batch: int, zero: dict[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's defaults, but: a torch optimizer may run as it is, and gradients are not clipped, as in all arms."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def prepare_deepspeed() -> None:
    """Let DeepSpeed find the ``ninja`` beside this Python (it compiles operators at first use), and be quiet."""
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    logging.disable(logging.INFO)
    sys.argv = sys.argv[:1]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss, batch: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _init_gloo() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
