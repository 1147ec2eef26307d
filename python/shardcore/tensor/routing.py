"""Which token goes to which expert, and how its row gets there and back.

A call's tokens are copied once for each expert that they were routed to, sorted by expert, and sent to the ranks that
hold these (all-to-all); what the experts make of them comes back the same way (Lepikhin et al. 2020, "GShard", section
3.1). No token is dropped and nothing is padded: each rank sends as many rows as its router chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardcore import comm
from shardcore.mesh import Axis


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Route:
    """The way of one call's tokens over the ranks of the expert axis."""

    axis: Axis
    unit: str
    num_chosen: int
    """Experts for each token."""
    by_expert: torch.Tensor
    """[tokens x chosen] the choices in the order of their experts; choice i is of token ``i // num_chosen``."""
    by_choice: torch.Tensor
    """[tokens x chosen] the inverse."""
    counts: list[list[int]]
    """Rows that go from each rank of the axis to each one."""
    by_local_expert: torch.Tensor
    """[rows that arrive here] them in the order of this rank's experts; they come in the order of ranks."""
    by_arrival: torch.Tensor
    """The inverse."""
    rows_of_expert: list[int]
    """How many of them each expert of this rank gets."""

    @classmethod
    def of(cls, chosen: torch.Tensor, num_experts: int, axis: Axis, unit: str) -> Route:
        """The way to the chosen experts ``[tokens, chosen]`` of ``num_experts`` on all ranks. Collective over the axis.

        Raises:
            IndexError: an expert that is not there.
        """
        flat = chosen.reshape(-1)
        by_expert = torch.argsort(flat, stable=True)
        mine = torch.bincount(flat, minlength=num_experts)
        if mine.numel() > num_experts:
            raise IndexError(f"{unit}: expert {mine.numel() - 1} was chosen, expected 0 to {num_experts - 1}")
        everyone = comm.gather_dim(mine.unsqueeze(0), axis, 0, f"tokens for experts of {unit}").wait()
        per_rank = everyone.view(axis.size, axis.size, num_experts // axis.size)
        arriving = per_rank[:, axis.rank]  # [source, expert of this rank]
        experts = torch.arange(arriving.shape[1], device=flat.device).repeat(axis.size)
        by_local_expert = torch.argsort(experts.repeat_interleave(arriving.reshape(-1)), stable=True)
        return cls(
            axis=axis,
            unit=unit,
            num_chosen=chosen.shape[1],
            by_expert=by_expert,
            by_choice=_inverse(by_expert),
            counts=per_rank.sum(-1).tolist(),
            by_local_expert=by_local_expert,
            by_arrival=_inverse(by_local_expert),
            rows_of_expert=arriving.sum(0).tolist(),
        )

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[tokens, features]`` to the rows of this rank's experts, one expert after the other. Collective over the
        axis, forward and backward.
        """
        rows: torch.Tensor = _Copy.apply(tokens, self.by_expert, self.by_choice, self.num_chosen)
        if self.axis.size == 1:
            return rows
        arrived = _Swap.apply(rows, self.counts, self.axis, f"tokens of {self.unit}")
        permuted: torch.Tensor = _Permute.apply(arrived, self.by_local_expert, self.by_arrival)
        return permuted

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts made of their rows to ``[tokens, features]``: for each token the sum over its experts, by
        ``weights [tokens, chosen]``. Collective over the axis, forward and backward.
        """
        if self.axis.size > 1:
            back = [list(column) for column in zip(*self.counts, strict=True)]
            rows = _Permute.apply(rows, self.by_arrival, self.by_local_expert)
            rows = _Swap.apply(rows, back, self.axis, f"outputs of {self.unit}")
        each: torch.Tensor = _Permute.apply(rows, self.by_choice, self.by_expert)
        each = each.unflatten(0, weights.shape) * weights.unsqueeze(-1)
        return each.to(rows.dtype).sum(1)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class _Copy(torch.autograd.Function):
    """One row for each choice. Gradients of a token's rows are summed in the order of its choices, on any device."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, num_chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = tokens.shape[0], num_chosen
        return tokens[order // num_chosen]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, ctx.shape).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: Sequence[Sequence[int]], axis: Axis, unit: str) -> torch.Tensor:
        ctx.settings = [list(column) for column in zip(*counts, strict=True)], axis, f"gradient of {unit}"
        return comm.swap_rows(rows, counts, axis, unit).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return comm.swap_rows(grad, *ctx.settings).wait(), None, None, None
