"""Attention over sequences that are split over ranks, whose keys and values travel around the ring of ranks.

Each rank keeps its queries and meets the keys of all parts, one after the other; what it has seen so far is kept as an
output and the logarithm of the sum of exponentials, by which the next part's are added (Liu et al. 2023, "Ring
Attention with Blockwise Transformers"; Milakov and Gimelshein 2018 for the sums). Backward goes around once more, and
the gradients of keys and values travel with them. No rank ever has the whole sequence, nor all scores of its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.tensor.sequences import context_axis

_MAX_SCORES = 1 << 24
"""Of these at most are in memory at a time."""


@private.not_traced
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axis: Axis | Mesh,
    *,
    causal: bool = False,
    balanced: bool = False,
    scale: float | None = None,
    unit: str = "attention",
) -> torch.Tensor:
    """Attention of the whole sequence, of which the ranks have equal parts. Collective over the context axis, forward
    and backward. Softmax and sums are taken in fp32, or fp64.

    Args:
        query: ``[batch, heads, sequence / ranks, features]``.
        key, value: ``[batch, key-value heads, sequence / ranks, features]``; their heads divide those of ``query``.
        causal: a position sees itself and those before it.
        balanced: how :func:`shardcore.tensor.part_of_sequence` has cut the sequence.
        scale: of the scores; None means ``features ** -0.5``.

    Returns:
        As ``query``.

    Raises:
        ConfigError: heads that do not divide, or parts of an odd length where they are balanced.
    """
    axis = context_axis(axis)
    if query.shape[1] % key.shape[1] or key.shape != value.shape or query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{unit}: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: expected "
            "[batch, heads, sequence, features], of which the key-value heads divide the query's"
        )
    if balanced and query.shape[2] % 2:
        raise ConfigError(f"{unit}: a balanced part of {query.shape[2]} positions does not have two equal pieces")
    if axis.size == 1:
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=gqa)
    job = _Job(axis, unit, causal, balanced, query.shape[-1] ** -0.5 if scale is None else scale)
    output: torch.Tensor = _Ring.apply(query, key, value, job)
    return output


@dataclass(frozen=True, slots=True)
class _Block:
    """What of a rank's queries meets what of another's keys."""

    rows: slice
    columns: slice
    causal: bool = False
    """Row i sees columns up to i."""


@dataclass(frozen=True, slots=True)
class _Job:
    axis: Axis
    unit: str
    causal: bool
    balanced: bool
    scale: float

    def block(self, source: int, length: int) -> _Block | None:
        """What of this rank's queries sees which of the ``source``'s keys; None if nothing."""
        rank, whole = self.axis.rank, slice(0, length)
        if not self.causal:
            return _Block(whole, whole)
        if source == rank:
            return _Block(whole, whole, causal=True)
        if not self.balanced:
            return _Block(whole, whole) if source < rank else None
        if source < rank:  # its first piece is before both of ours, its last one behind them
            return _Block(whole, slice(0, length // 2))
        return _Block(slice(length // 2, length), whole)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, job: _Job) -> torch.Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=dtype, device=query.device)
        log_sum = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
        for block, keys, values in _around(torch.stack([key, value]), job, "keys"):
            if block is None:
                continue
            part, sums = _attend(query[:, :, block.rows], keys, values, block, job.scale)
            _add(output[:, :, block.rows], log_sum[:, :, block.rows], part, sums)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.job = job
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, output, log_sum = ctx.saved_tensors
        job: _Job = ctx.job
        delta = (grad * output).sum(-1)
        query_grad = torch.zeros_like(output)
        moving: comm.Pending | None = None
        for block, keys, values in _around(torch.stack([key, value]), job, "keys for backward"):
            found = None
            if block is not None:
                seen = _Seen(*(x[:, :, block.rows] for x in (query, grad, log_sum, delta)))
                part, found = _attend_backward(seen, keys, values, block, job.scale)
                query_grad[:, :, block.rows] += part
            # Those of the keys that are here come from the rank before, as the keys did.
            grads = output.new_zeros((2, *key.shape)) if moving is None else moving.wait()
            if block is not None and found is not None:
                grads[:, :, :, block.columns] += found
            moving = comm.pass_on(grads, job.axis, f"gradients of keys of {job.unit}")
        assert moving is not None  # a ring has ranks
        key_grad, value_grad = moving.wait().to(key.dtype).unbind(0)
        return query_grad.to(query.dtype), key_grad, value_grad, None


def _around(pair: torch.Tensor, job: _Job, what: str) -> Iterator[tuple[_Block | None, torch.Tensor, torch.Tensor]]:
    """(block, its keys, its values) of every rank's part, beginning with this one's; the next ones travel meanwhile."""
    axis, length = job.axis, pair.shape[3]
    for step in range(axis.size):
        is_last = step + 1 == axis.size
        coming = None if is_last else comm.pass_on(pair, axis, f"{what} of {job.unit}")
        block = job.block((axis.rank - step) % axis.size, length)
        columns = slice(0, length) if block is None else block.columns
        yield block, pair[0, :, :, columns], pair[1, :, :, columns]
        if coming is not None:
            pair = coming.wait()


def _add(output: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, sums: torch.Tensor) -> None:
    """Add attention over more keys, in place."""
    total = torch.logaddexp(log_sum, sums)
    output.mul_((log_sum - total).exp_().unsqueeze(-1))
    output.add_(part.mul_((sums - total).exp_().unsqueeze(-1)))
    log_sum.copy_(total)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: _Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [batch, heads, rows, features], log of the sum of exponentials [batch, heads, rows]) over some keys."""
    key, value = (_wide(x) for x in (key, value))
    rows = _by_key_head(query, key)
    output, log_sum = rows.new_empty(rows.shape), rows.new_empty(rows.shape[:-1])
    for tile, masked in _tiles(rows, key, query.shape[2], causal=block.causal):
        scores = (rows[:, :, tile] * scale) @ key.mT
        if masked is not None:
            scores.masked_fill_(masked, -torch.inf)
        log_sum[:, :, tile] = scores.logsumexp(-1)
        output[:, :, tile] = scores.sub_(log_sum[:, :, tile].unsqueeze(-1)).exp_() @ value
    return output.view(query.shape), log_sum.view(query.shape[:-1])


@dataclass(frozen=True, slots=True)
class _Seen:
    """What backward needs of some rows of the whole attention."""

    query: torch.Tensor
    grad: torch.Tensor
    log_sum: torch.Tensor
    delta: torch.Tensor
    """[batch, heads, rows] the sum over features of gradient times output."""


def _attend_backward(
    seen: _Seen, key: torch.Tensor, value: torch.Tensor, block: _Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the query, gradients [2, ...] of key and value) from these keys' part of the whole softmax."""
    key, value = (_wide(x) for x in (key, value))
    rows, outs = (_by_key_head(x, key) for x in (seen.query, seen.grad))
    sums, deltas = (x.reshape(rows.shape[:-1]).unsqueeze(-1) for x in (seen.log_sum, seen.delta))
    query_grad, grads = torch.empty_like(rows), torch.zeros_like(torch.stack([key, value]))
    for tile, masked in _tiles(rows, key, seen.query.shape[2], causal=block.causal):
        scores = (rows[:, :, tile] * scale) @ key.mT
        if masked is not None:
            scores.masked_fill_(masked, -torch.inf)
        share = scores.sub_(sums[:, :, tile]).exp_()
        grads[1] += share.mT @ outs[:, :, tile]
        share.mul_((outs[:, :, tile] @ value.mT).sub_(deltas[:, :, tile])).mul_(scale)
        query_grad[:, :, tile] = share @ key
        grads[0] += share.mT @ rows[:, :, tile]
    return query_grad.view(seen.query.shape), grads


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_key_head(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, key heads, heads x rows, features] the rows of all query heads of a key head, one after the other."""
    return _wide(x).reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


def _tiles(
    rows: torch.Tensor, key: torch.Tensor, num_positions: int, *, causal: bool
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """The rows in tiles of few enough scores, and which of these a causal mask hides."""
    batch, num_heads, num_rows, _ = rows.shape
    step = max(1, _MAX_SCORES // max(1, batch * num_heads * key.shape[2]))
    columns = torch.arange(key.shape[2], device=rows.device)
    for start in range(0, num_rows, step):
        tile = slice(start, min(start + step, num_rows))
        positions = torch.arange(tile.start, tile.stop, device=rows.device) % num_positions
        yield tile, columns > positions.unsqueeze(-1) if causal else None
