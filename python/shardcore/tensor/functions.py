"""How activations cross the edges of a tensor-parallel region, forward and backward.

An activation is *replicated* (every rank of the axis has the same), *partial* (the ranks' values add up to it) or
*split* along a dim. Each function takes one to another, and its gradient the other way (Shoeybi et al. 2019,
"Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2, for sequences).
All are collective over the axis, forward or backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.mesh import Axis


def copy_to_ranks(x: torch.Tensor, axis: Axis, unit: str = "activation") -> torch.Tensor:
    """A replicated activation that each rank uses for a part of the work: its gradient is summed over the ranks."""
    return _apply(_Copy, x, axis, unit)


def sum_over_ranks(x: torch.Tensor, axis: Axis, unit: str = "activation") -> torch.Tensor:
    """Partial to replicated. Overwrites ``x``; the gradient passes unchanged."""
    return _apply(_Sum, x, axis, unit)


def gather_from_ranks(
    x: torch.Tensor, axis: Axis, dim: int = -1, unit: str = "activation", lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """Split along ``dim`` to replicated; each rank keeps its part of the gradient. ``lengths``: of each rank's part,
    where they differ.
    """
    return _apply(_Gather, x, axis, dim, unit, lengths)


def split_to_ranks(
    x: torch.Tensor, axis: Axis, dim: int = -1, unit: str = "activation", lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """Replicated to split along ``dim``; the gradient is gathered.

    Raises:
        ConfigError: without ``lengths``, the ranks do not divide the dim.
    """
    return _apply(_Split, x, axis, dim, unit, lengths)


def gather_sequence(x: torch.Tensor, axis: Axis, dim: int = 1, unit: str = "activation") -> torch.Tensor:
    """Split along ``dim`` to one copy on each rank, of which each uses a part: the gradient is summed and split."""
    return _apply(_GatherSequence, x, axis, dim, unit)


def reduce_to_sequence(x: torch.Tensor, axis: Axis, dim: int = 1, unit: str = "activation") -> torch.Tensor:
    """Partial to split along ``dim``; the gradient is gathered.

    Raises:
        ConfigError: the ranks do not divide the dim.
    """
    return _apply(_ReduceSequence, x, axis, dim, unit)


@private.not_traced
def _apply(function: Any, x: torch.Tensor, axis: Axis, *args: Any) -> torch.Tensor:
    return x if axis.size == 1 else function.apply(x, axis, *args)


def _own_part(x: torch.Tensor, axis: Axis, dim: int, unit: str, lengths: Sequence[int] | None) -> torch.Tensor:
    parts = comm.equal_parts(x, axis, dim, unit) if lengths is None else x.split(list(lengths), dim)
    return parts[axis.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, unit: str) -> torch.Tensor:
        ctx.axis, ctx.unit = axis, unit
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = grad.contiguous().clone()
        comm.sum_tensor(total, ctx.axis, f"input gradient of {ctx.unit}").wait()
        return total, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, axis: Axis, unit: str) -> torch.Tensor:
        total = x.contiguous()
        comm.sum_tensor(total, axis, f"output of {unit}").wait()
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, dim: int, unit: str, lengths: Sequence[int] | None
    ) -> torch.Tensor:
        ctx.settings = axis, dim, unit, lengths
        return comm.gather_dim(x, axis, dim, f"parts of {unit}", lengths).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _own_part(grad, *ctx.settings), None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, dim: int, unit: str, lengths: Sequence[int] | None
    ) -> torch.Tensor:
        ctx.settings = axis, dim, unit, lengths
        return _own_part(x, axis, dim, unit, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        axis, dim, unit, lengths = ctx.settings
        whole = comm.gather_dim(grad, axis, dim, f"gradient parts of {unit}", lengths).wait()
        return whole, None, None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, unit: str) -> torch.Tensor:
        ctx.settings = axis, dim, unit
        return comm.gather_dim(x, axis, dim, f"sequence of {unit}").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        axis, dim, unit = ctx.settings
        return comm.reduce_dim(grad, axis, dim, f"input gradient of {unit}").wait(), None, None, None


class _ReduceSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, unit: str) -> torch.Tensor:
        ctx.settings = axis, dim, unit
        return comm.reduce_dim(x, axis, dim, f"output of {unit}").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        axis, dim, unit = ctx.settings
        return comm.gather_dim(grad, axis, dim, f"output gradient of {unit}").wait(), None, None, None
