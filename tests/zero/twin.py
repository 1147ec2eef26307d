"""The same training twice: sharded over ranks, and as a plain loop in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardcore as sc
from zero.models import ZOO, Case, rows_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Adam divides by the gradient's own size: where the true gradient is zero (a key's bias in attention) it turns
# rounding into
# full steps. This epsilon lies above the rounding of fp32 and below every real gradient here; `options_of` raises it
# for 16 bits.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),
    "sgd": (torch.optim.SGD, {"lr": 2e-2, "momentum": 0.9}),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, and how."""

    case: str = "odd"
    stage: int = 3
    precision: str = "fp32"
    accumulation: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    steps: int = 20
    loss_scale: float | None = None

    @property
    def zoo(self) -> Case:
        return ZOO[self.case]


@dataclass(kw_only=True)
class Trained:
    """What a run left."""

    losses: list[float]
    """Mean loss over micro-batches and ranks, per step."""
    norms: list[float]
    """Global gradient norm before clipping, per step."""
    parameters: dict[str, torch.Tensor]


def train_sharded(recipe: Recipe, mesh: sc.Mesh | None = None, **shard_options: Any) -> Trained:
    """Train on this rank's rows, by the hand-written loop. Collective."""
    mesh = mesh or sc.Mesh(device="cpu")
    model = WithLoss(recipe.zoo.model(), recipe.zoo.loss)
    precision = sc.Precision(
        param=None if recipe.precision == "fp32" else recipe.precision, loss_scale=recipe.loss_scale
    )
    sc.shard(model, mesh, stage=recipe.stage, precision=precision, **shard_options)
    cls, options = options_of(recipe)
    optimizer = sc.optimizer(cls, model, max_grad_norm=recipe.clip, **options)
    optimizer.track_grad_norm = True
    run = Trained(losses=[], norms=[], parameters={})
    for step in range(recipe.steps):
        total = torch.zeros(())
        for micro in range(recipe.accumulation):
            batch = rows_of(recipe.zoo.batch(step, micro), mesh.data_rank, mesh.data_world)
            loss = model(batch)
            (loss / recipe.accumulation).backward()
            total += loss.detach() / recipe.accumulation
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(mean_over_ranks(total, mesh)))
        run.norms.append(optimizer.grad_norm or 0.0)
    run.parameters = {name.removeprefix("model."): value for name, value in whole_parameters(model).items()}
    return run


class WithLoss(nn.Module):
    """A model that returns its loss in fp32: there a loss scale enters where the reference applies it."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The mean loss of the batch."""
        return self.loss(self.model, batch)


def options_of(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and options."""
    cls, options = OPTIMIZERS[recipe.optimizer]
    if recipe.optimizer == "adamw" and recipe.precision != "fp32":
        options = {**options, "eps": 1e-3}
    return cls, options


def train_alone(recipe: Recipe, world: int) -> Trained:
    """The reference: one process, the global batch in ``world`` parts, fp32 masters beside 16-bit parameters."""
    model = recipe.zoo.model()
    if recipe.precision != "fp32":
        model.to(DTYPES[recipe.precision])
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone().requires_grad_() for p in trained]
    cls, options = options_of(recipe)
    optimizer = cls(masters, **options)
    scale = recipe.loss_scale or 1.0
    run = Trained(losses=[], norms=[], parameters={})
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.accumulation):
            batch = recipe.zoo.batch(step, micro)
            for rank in range(world):
                loss = recipe.zoo.loss(model, cast(rows_of(batch, rank, world), DTYPES[recipe.precision]))
                (loss * scale / recipe.accumulation).backward()
                total += float(loss.detach()) / recipe.accumulation / world
                collect(trained, masters, 1 / world)
        run.norms.append(apply(optimizer, trained, masters, recipe.clip, scale))
        run.losses.append(total)
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def cast(batch: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Floating tensors in ``dtype``, as the sharded model's root does it."""
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)


def collect(trained: list[nn.Parameter], masters: list[torch.Tensor], factor: float) -> None:
    """Add the 16-bit gradients to the masters' in the masters' dtype."""
    for param, master in zip(trained, masters, strict=True):
        if param.grad is not None:
            grad = param.grad.to(master.dtype) * factor
            master.grad = grad if master.grad is None else master.grad + grad
            param.grad = None


def apply(
    optimizer: torch.optim.Optimizer,
    trained: list[nn.Parameter],
    masters: list[torch.Tensor],
    clip: float | None,
    scale: float,
) -> float:
    """Unscale, clip, update, copy back; a step with inf or NaN is skipped where gradients are scaled. Returns the
    norm.
    """
    grads = [master.grad for master in masters if master.grad is not None]
    for grad in grads:
        grad.div_(scale)
    norm = float(torch.stack([grad.double().norm() for grad in grads]).norm())
    if clip is not None:
        for grad in grads:
            grad.mul_(min(1.0, clip / (norm + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for param, master in zip(trained, masters, strict=True):
            param.copy_(master)
    return norm


def mean_over_ranks(value: torch.Tensor, mesh: sc.Mesh) -> torch.Tensor:
    """The mean of a scalar over the data-parallel ranks."""
    return sc.comm.sum_over_ranks(value.clone(), mesh["dp"], "test mean") / mesh.data_world


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name, on every rank. Collective."""
    with sc.summon(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest absolute difference relative to the largest value of each parameter (at least 1), and where it is."""
    assert a.keys() == b.keys()
    found = [(0.0, "")]
    for name in a:
        if a[name].numel():
            scale = max(1.0, float(b[name].abs().max()))
            off = float((a[name].double() - b[name].double()).abs().max()) / scale
            found.append((off if math.isfinite(off) else math.inf, name))
    return max(found)
