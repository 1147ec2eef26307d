"""Attention over sequences that are split over ranks, by exchanging parts of the sequence for heads.

Before attention each rank gives away heads of its part of the sequence, and gets the whole sequence of its own heads;
after it the other way (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3).
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.tensor.sequences import context_axis


def sequence_to_heads(
    x: torch.Tensor, axis: Axis | Mesh, sequence_dim: int = 2, heads_dim: int = 1, unit: str = "attention"
) -> torch.Tensor:
    """All heads of this rank's part of the sequence to the whole sequence of its part of the heads. Collective over the
    context axis, forward and backward (the other way).

    Raises:
        ConfigError: the ranks do not divide the heads.
    """
    return _exchange(x, context_axis(axis), heads_dim, sequence_dim, unit)


def heads_to_sequence(
    x: torch.Tensor, axis: Axis | Mesh, sequence_dim: int = 2, heads_dim: int = 1, unit: str = "attention"
) -> torch.Tensor:
    """The inverse of :func:`sequence_to_heads`.

    Raises:
        ConfigError: the ranks do not divide the sequence.
    """
    return _exchange(x, context_axis(axis), sequence_dim, heads_dim, unit)


@private.not_traced
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axis: Axis | Mesh,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    unit: str = "attention",
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` of the whole sequence, of which the ranks have equal parts
    in their order. Collective over the context axis, forward and backward.

    Args:
        query: ``[batch, heads, sequence / ranks, features]``.
        key, value: ``[batch, key-value heads, sequence / ranks, features]``; their heads divide those of ``query``, and
            are copied where they are fewer than ranks.

    Returns:
        As ``query``, with the features of ``value``.

    Raises:
        ConfigError: heads that do not divide over the ranks.
    """
    axis = context_axis(axis)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    copies = axis.size // gcd(axis.size, num_kv_heads)
    if num_heads % axis.size or num_heads % (num_kv_heads * copies):
        raise ConfigError(
            f"{unit}: {num_heads} heads and {num_kv_heads} key-value heads do not divide over the {axis.size} ranks of "
            f"axis {axis.name!r}; choose a size that divides the heads, or ring attention, which splits none"
        )
    if copies > 1:
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    parts = [x.chunk(axis.size, 1) for x in (query, key, value)]
    counts = [x.shape[1] // axis.size for x in (query, key, value)]
    if query.shape[-1] == value.shape[-1]:  # one exchange for all three
        packed = torch.cat([torch.cat(of_rank, 1) for of_rank in zip(*parts, strict=True)], 1)
        query, key, value = sequence_to_heads(packed, axis, unit=unit).split(counts, 1)
    else:
        query, key, value = (sequence_to_heads(x, axis, unit=unit) for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=counts[0] != counts[1]
    )
    return heads_to_sequence(output, axis, unit=unit)


@private.not_traced
def _exchange(x: torch.Tensor, axis: Axis, split_dim: int, gather_dim: int, unit: str) -> torch.Tensor:
    return x if axis.size == 1 else _Exchange.apply(x, axis, split_dim, gather_dim, unit)


class _Exchange(torch.autograd.Function):
    """Split along one dim over the ranks, and gather along another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split_dim: int, gather_dim: int, unit: str) -> torch.Tensor:
        ctx.settings = axis, gather_dim, split_dim, unit
        return _swap(x, axis, split_dim, gather_dim, unit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _swap(grad, *ctx.settings), None, None, None, None


def _swap(x: torch.Tensor, axis: Axis, split_dim: int, gather_dim: int, unit: str) -> torch.Tensor:
    parts = torch.stack(comm.equal_parts(x, axis, split_dim, unit))
    one_each = [[1] * axis.size for _ in range(axis.size)]
    received = comm.swap_rows(parts, one_each, axis, f"heads and sequence of {unit}").wait()
    return torch.cat(received.unbind(0), gather_dim)
