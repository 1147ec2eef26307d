"""The unsharded twin: a plain single-process torch loop on the global batch, and comparisons with it.

Nothing here uses shardcore's engine, layouts or communication, so an error there cannot repeat itself here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.testing.zoo import Batch
from shardcore.testing.zoo import loss as zoo_loss

LossFunction = Callable[[nn.Module, Batch], Tensor]


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """What a training run did, step by step, and where it ended."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step, over its micro-batches."""
    grad_norms: list[float] = field(default_factory=list)
    """Global L2 norm of each step's gradient, unscaled and before clipping."""
    skipped: list[int] = field(default_factory=list)
    """Indices of the steps not applied because the gradient was not finite."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Final parameters by name, frozen ones included, a tied one once; with ``dtype`` the float32 masters."""


def reference(
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    accumulation: int = 1,
    clip: float | None = None,
    loss: LossFunction = zoo_loss,
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    dtype: torch.dtype | None = None,
    loss_scale: float = 1.0,
) -> Trajectory:
    """Train ``build()`` on ``batches``, the global micro-batches; each step takes ``accumulation`` of them.

    A step applies the mean gradient of its micro-batches, clipped to the global norm ``clip``; a parameter without a
    gradient is not updated. ``optimizer`` makes one from the trainable parameters, ``scheduler`` steps once per
    applied step.

    With ``dtype`` (bfloat16, float16) the forward and backward run on a copy in that dtype, its floating inputs cast,
    while gradients are summed, and parameters updated, in float32; gradients come from the loss times ``loss_scale``
    and are divided by it again, and a step whose gradient is not finite is skipped.

    Raises ``ValueError`` unless ``accumulation`` divides the number of micro-batches.
    """
    if accumulation < 1 or len(batches) % accumulation:
        raise ValueError(f"{len(batches)} micro-batches do not make whole steps of {accumulation}")
    loop = _Loop(build, optimizer, scheduler, dtype)
    for start in range(0, len(batches), accumulation):
        loop.step(batches[start : start + accumulation], loss, clip, loss_scale)
    loop.trajectory.parameters = {name: p.detach().clone() for name, p in loop.master.named_parameters()}
    return loop.trajectory


class _Loop:
    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.master = build()
        self.model = self.master if dtype is None else _with_parameters_in(build(), dtype)
        self.dtype = dtype
        self.trainable = [p for p in self.master.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.trainable)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.trajectory = Trajectory()

    def step(self, batches: Sequence[Batch], loss: LossFunction, clip: float | None, loss_scale: float) -> None:
        scale = loss_scale / len(batches)
        total = sum(self._forward_backward(batch, loss, scale) for batch in batches)
        grads = [p.grad for p in self.trainable if p.grad is not None]
        for grad in grads:
            grad.div_(loss_scale)
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        self.trajectory.losses.append(total / len(batches))
        self.trajectory.grad_norms.append(norm)
        if math.isfinite(norm):
            if clip is not None:
                for grad in grads:
                    grad.mul_(min(1.0, clip / (norm + 1e-6)))  # the coefficient of torch.nn.utils.clip_grad_norm_
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        else:
            self.trajectory.skipped.append(len(self.trajectory.losses) - 1)
        self.optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self, batch: Batch, loss: LossFunction, scale: float) -> float:
        if self.dtype is None:
            value = loss(self.model, batch)
            (value * scale).backward()
            return value.item()
        return self._low_precision(self.dtype, batch, loss, scale)

    def _low_precision(self, dtype: torch.dtype, batch: Batch, loss: LossFunction, scale: float) -> float:
        with torch.no_grad():
            for copy, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                copy.copy_(master)
        cast = {k: v.to(dtype) if v.is_floating_point() and k != "target" else v for k, v in batch.items()}
        value = loss(self.model, cast)
        (value * scale).backward()
        for copy, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
            if copy.grad is not None:
                grad = copy.grad.to(master.dtype)
                master.grad = grad if master.grad is None else master.grad + grad
                copy.grad = None
        return value.item()


def _with_parameters_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters alone: ``Module.to`` would cast buffers too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def assert_close_trees(actual: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Compare nested dicts, lists and tuples of tensors and numbers within a tolerance.

    Passes where ``|actual - expected| <= atol + rtol * |expected|`` for every element. Raises ``AssertionError``
    that lists every leaf which differs, by path, with its largest difference; keys, lengths, shapes and dtypes must
    agree exactly.
    """
    leaves = _leaves(actual, expected, "")
    _raise_if([f"{path}: {problem}" for path, a, b in leaves if (problem := _difference(a, b, rtol=rtol, atol=atol))])


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Like ``assert_close_trees``, but every bit must agree (so a NaN equals itself, and -0.0 is not 0.0)."""
    leaves = _leaves(actual, expected, "")
    _raise_if([f"{path}: {problem}" for path, a, b in leaves if (problem := _bit_difference(a, b))])


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise AssertionError("\n".join(["trees differ:", *problems]))


def _leaves(actual: Any, expected: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(actual, dict) and isinstance(expected, dict):
        if actual.keys() != expected.keys():
            raise AssertionError(
                f"{path or 'root'}: only in actual {sorted(actual.keys() - expected.keys())}, "
                f"only in expected {sorted(expected.keys() - actual.keys())}"
            )
        pairs = [(f"{path}[{key!r}]", actual[key], expected[key]) for key in expected]
    elif isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            raise AssertionError(f"{path or 'root'}: {len(actual)} items, expected {len(expected)}")
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(actual, expected, strict=True))]
    else:
        return [(path or "root", actual, expected)]
    return [leaf for sub_path, a, b in pairs for leaf in _leaves(a, b, sub_path)]


def _kind_difference(actual: Any, expected: Any) -> str:
    if isinstance(actual, Tensor) != isinstance(expected, Tensor):
        return f"{type(actual).__name__}, expected {type(expected).__name__}"
    if isinstance(actual, Tensor):
        for what in ("dtype", "shape", "device"):
            a, b = getattr(actual, what), getattr(expected, what)
            if a != b:
                return f"{what} {a}, expected {b}"
    return ""


def _difference(actual: Any, expected: Any, *, rtol: float, atol: float) -> str:
    problem = _kind_difference(actual, expected)
    if problem or not isinstance(expected, Tensor | int | float):
        return problem or ("" if actual == expected else f"{actual!r}, expected {expected!r}")
    a, b = (torch.as_tensor(value).detach().double() for value in (actual, expected))
    bad = ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if not bad.any():
        return ""
    worst = int((a - b).abs().nan_to_num(nan=math.inf).argmax())
    return (
        f"{int(bad.sum())} of {a.numel()} elements differ by up to {float((a - b).abs().flatten()[worst]):.3e} "
        f"({float(a.flatten()[worst]):.9g}, expected {float(b.flatten()[worst]):.9g}; rtol {rtol:g}, atol {atol:g})"
    )


def _bit_difference(actual: Any, expected: Any) -> str:
    problem = _kind_difference(actual, expected)
    if problem:
        return problem
    if isinstance(actual, float) and isinstance(expected, float):
        actual, expected = (torch.tensor(value, dtype=torch.float64) for value in (actual, expected))
    if not isinstance(expected, Tensor):
        return "" if actual == expected else f"{actual!r}, expected {expected!r}"
    a, b = (value.detach().contiguous().flatten() for value in (actual, expected))
    a_bits, b_bits = (value.view(torch.uint8).view(value.numel(), -1) if value.numel() else value for value in (a, b))
    bad = (a_bits != b_bits).flatten(1).any(1) if a.numel() else torch.zeros(0, dtype=torch.bool)
    if not bad.any():
        return ""
    where = int(bad.nonzero()[0])
    return f"{int(bad.sum())} of {a.numel()} elements differ, the first at {where}: {a[where]!r}, expected {b[where]!r}"
