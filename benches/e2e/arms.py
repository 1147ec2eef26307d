"""The same training step by every library: ``build(arm, ...)`` gives a function that takes a batch and makes one step.

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
"""int64 [batch, time + 1] -> this rank's mean loss, detached."""


def is_available(arm: str) -> bool:
    """Whether the arm's library is installed; torch and shardcore always are."""
    return not arm.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


def build(arm: str, model: nn.Module, micro_batch: int) -> Step:
    """Shard or wrap ``model`` (changed in place) as the arm does. Collective over all ranks."""
    library, _, stage = arm.partition("-")
    if library == "shardcore":
        return _shardcore(model, int(stage))
    if library == "deepspeed":
        return _deepspeed(model, int(stage), micro_batch)
    return {"ddp": _ddp, "fsdp2": _fsdp2}[library](model)


def next_token_loss(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Mean nats per token: int64 [batch, time + 1] -> scalar."""
    from torch.nn import functional as F

    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _shardcore(model: nn.Module, stage: int) -> Step:
    import torch

    import shardcore as sc

    sc.shard(model, sc.Mesh(device="cpu"), stage=stage)
    return partial(_plain_step, model, sc.optimizer(torch.optim.AdamW, model, **OPTIMIZER))


def _ddp(model: nn.Module) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    _init_gloo()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return partial(_plain_step, wrapped, torch.optim.AdamW(wrapped.parameters(), **OPTIMIZER))


def _fsdp2(model: nn.Module) -> Step:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _init_gloo()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return partial(_plain_step, model, torch.optim.AdamW(model.parameters(), **OPTIMIZER))


def _deepspeed(model: nn.Module, stage: int, micro_batch: int) -> Step:
    prepare_deepspeed()
    import torch

    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **OPTIMIZER),
        config=deepspeed_config(stage, micro_batch),
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def deepspeed_config(stage: int, micro_batch: int) -> dict[str, Any]:
    """DeepSpeed's defaults, but: a torch optimizer may run as it is, and gradients are not clipped, as in all arms."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "zero_optimization": {"stage": stage},
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


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    loss = next_token_loss(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _init_gloo() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
