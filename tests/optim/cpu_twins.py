"""The CPU optimizers, torch's optimizers of the same rule, and trainings that both can make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import shardcore as sc

Shapes = Sequence[tuple[int, ...]]

SHAPES: Shapes = ((7, 5), (129,), (), (0,), (1,), (64, 33), (4097,))


class TorchLion(torch.optim.Optimizer):
    """Lion as its paper writes it (arXiv 2302.06675, algorithm 2); torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@dataclass(frozen=True)
class Rule:
    """One rule with options, on both sides."""

    name: str
    ours: type[torch.optim.Optimizer]
    theirs: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Iterable[Any], **more: Any) -> torch.optim.Optimizer:
        return self.ours(params, **{**self.options, **more})

    def twin(self, params: Iterable[Any], **more: Any) -> torch.optim.Optimizer:
        return self.theirs(params, **{**self.options, **more})


RULES = [
    Rule("adamw", sc.optim.CPUAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    Rule("adamw-max", sc.optim.CPUAdamW, torch.optim.AdamW, {"lr": 1e-3, "betas": (0.8, 0.95), "maximize": True}),
    Rule("adam", sc.optim.CPUAdam, torch.optim.Adam, {"lr": 1e-2}),
    Rule("adam-l2", sc.optim.CPUAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}),
    Rule("lion", sc.optim.CPULion, TorchLion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    Rule("adagrad", sc.optim.CPUAdagrad, torch.optim.Adagrad, {"lr": 1e-2}),
    Rule(
        "adagrad-decay",
        sc.optim.CPUAdagrad,
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    Rule("sgd", sc.optim.CPUSGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    Rule("momentum", sc.optim.CPUSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    Rule("nesterov", sc.optim.CPUSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


def parameters(shapes: Shapes = SHAPES, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Random parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: Sequence[torch.Tensor], step: int, scale: float = 1.0) -> None:
    """Random gradients of one step, the same on both sides and whatever the parameters are."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=generator)).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], steps: Iterable[int]) -> None:
    """Some steps on random gradients."""
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative distance in L2 of all parameters together, in fp64."""
    found, expected = [p.detach() for p in found], [p.detach() for p in expected]
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    size = sum(float(b.double().square().sum()) for b in expected)
    return (difference / size) ** 0.5
