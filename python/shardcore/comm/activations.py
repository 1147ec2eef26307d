"""Collectives on tensors as layers hold them: sums in place, and gathers and reductions along a dim.

They are made of the collectives on flat buffers, so that sums are taken in rank order and every rank ends with the
same bits. All are collective over the axis, and start at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardcore.comm.collectives import DONE, Handle, all_reduce, exchange_rows, gather_shards, reduce_shards, sum_of_two
from shardcore.comm.steps import Steps
from shardcore.errors import ConfigError
from shardcore.mesh import Axis


class Pending:
    """A tensor that a collective is making; :meth:`wait` returns it."""

    __slots__ = ("_handle", "_result")

    def __init__(self, handle: Handle | Pending, result: Callable[[], torch.Tensor]) -> None:
        self._handle = handle
        self._result = result

    def wait(self) -> torch.Tensor:
        """The tensor, when it may be used.

        Raises:
            RankMismatchError: ranks are in different collectives, or one has failed.
        """
        self._handle.wait()
        return self._result()


def sum_tensor(tensor: torch.Tensor, axis: Axis, unit: str) -> Handle:
    """Sum a contiguous tensor over the axis, in place."""
    if axis.size == 1 or tensor.numel() == 0:
        return DONE
    pair = sum_of_two(tensor, axis, unit)
    if pair is not None:
        return pair
    if tensor.is_cuda or tensor.numel() % axis.size:
        return all_reduce(tensor, axis, unit)
    flat = tensor.view(-1)
    # On CPU two steps through each other's memory take half the time of gloo's ring, or less.
    return Steps((lambda: reduce_shards(flat, axis, unit), lambda: gather_shards(flat, axis, unit)))


def gather_dim(tensor: torch.Tensor, axis: Axis, dim: int, unit: str, lengths: Sequence[int] | None = None) -> Pending:
    """Every rank's ``tensor`` side by side along ``dim``, in rank order.

    Args:
        lengths: how long each rank's tensor is along ``dim``; None: all as long as this rank's. Other dims are alike.
    """
    if axis.size == 1:
        return Pending(DONE, lambda: tensor)
    dim = dim % tensor.dim()
    lengths = lengths or [tensor.shape[dim]] * axis.size
    shape = list(tensor.shape)
    shape[dim] = max(lengths)
    buffer = tensor.new_empty((axis.size, *shape))
    buffer[axis.rank].narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    handle = gather_shards(buffer.view(-1), axis, unit)
    parts = [part.narrow(dim, 0, length) for part, length in zip(buffer, lengths, strict=True)]
    return Pending(handle, lambda: torch.cat(parts, dim))


def reduce_dim(tensor: torch.Tensor, axis: Axis, dim: int, unit: str) -> Pending:
    """The sum of all ranks' tensors, of which each rank gets its part along ``dim``.

    Raises:
        ConfigError: the ranks do not divide the dim.
    """
    if axis.size == 1:
        return Pending(DONE, lambda: tensor)
    parts = equal_parts(tensor, axis, dim, unit)
    buffer = torch.stack(parts)
    return Pending(reduce_shards(buffer.view(-1), axis, unit), lambda: buffer[axis.rank].clone())


def swap_rows(rows: torch.Tensor, counts: Sequence[Sequence[int]], axis: Axis, unit: str) -> Pending:
    """The rows that the axis's ranks have for this one, in rank order (all-to-all).

    Args:
        rows: ``[sum(counts[rank]), ...]``, in the order of the ranks that they go to.
        counts: ``counts[i][j]`` rows go from rank i to rank j; the same on all ranks.
    """
    if axis.size == 1:
        return Pending(DONE, lambda: rows)
    rows = rows.contiguous()
    received = rows.new_empty((sum(row[axis.rank] for row in counts), *rows.shape[1:]))
    return Pending(exchange_rows(rows, received, counts, axis, unit), lambda: received)


def pass_on(tensor: torch.Tensor, axis: Axis, unit: str) -> Pending:
    """The tensor of the rank before this one along the axis, which is a ring. All ranks' have one shape and dtype."""
    places = range(axis.size)
    counts = [[int(target == (source + 1) % axis.size) for target in places] for source in places]
    pending = swap_rows(tensor.unsqueeze(0), counts, axis, unit)
    return Pending(pending, lambda: pending.wait().squeeze(0))


def equal_parts(tensor: torch.Tensor, axis: Axis, dim: int, unit: str) -> tuple[torch.Tensor, ...]:
    """The tensor in one equal part for each rank along ``dim``.

    Raises:
        ConfigError: the ranks do not divide the dim.
    """
    if tensor.shape[dim] % axis.size:
        raise ConfigError(
            f"{unit}: dim {dim} of shape {tuple(tensor.shape)} does not split over the {axis.size} ranks of axis "
            f"{axis.name!r}; pad it to a multiple of {axis.size}"
        )
    return tuple(tensor.chunk(axis.size, dim))
