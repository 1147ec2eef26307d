"""All-gather, reduce-scatter, all-reduce and broadcast on flat buffers, chosen per backend.

A flat buffer of an axis of W ranks is W equal shards; this rank owns the shard at its position. All operations work in
place on that buffer. They are collective over the axis, start at once and return a :class:`Handle` to wait for.

On NCCL these are the native collectives. On CPU they are composed: gloo's reduce-scatter is an all-reduce of which most
is thrown away, while an all-to-all with a local sum in rank order moves exactly the reduce-scatter volume; and one
broadcast per shard gathers without staging copies. Ranks on one machine do the same by reading each other's memory
(:mod:`neighbours`). ``benches/micro/collectives.py`` shows all of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardcore.comm import neighbours, watch
from shardcore.mesh import Axis

if TYPE_CHECKING:
    from shardcore.comm.program import Program

_traffic: Counter[str] = Counter()
_edges: Counter[tuple[int, int]] = Counter()


class Handle:
    """A collective under way. ``wait()`` returns when its result may be used; further calls return at once."""

    __slots__ = ("_entry", "_finish", "_works")

    def __init__(
        self, works: Sequence[watch.Waitable], entry: watch.Entry | None, finish: Callable[[], None] | None = None
    ) -> None:
        self._works = works
        self._entry = entry
        self._finish = finish

    def wait(self) -> None:
        """Wait for the data; on CUDA this orders the stream and does not block the host.

        Raises:
            RankMismatchError: ranks are in different collectives, or one has failed.
        """
        if self._entry is not None:
            for work in self._works:
                watch.wait(work, self._entry)
        self._works = ()  # only now: after an error the data have not come, and a further call must not say so
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_complete(self, within_s: float = 0.0) -> bool:
        """Whether :meth:`wait` would return at once, now or ``within_s`` seconds from now."""
        deadline = time.monotonic() + within_s
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True


DONE = Handle((), None)


def gather_shards(full: torch.Tensor, axis: Axis, unit: str, program: Program | None = None) -> Handle:
    """Fill ``full`` [W x shard_numel] with every rank's own shard; this rank's must be in its place already."""
    if axis.size == 1 or full.numel() == 0:
        return DONE
    if program is not None:
        program.enter(axis, watch.label_of("gather", unit, full.numel()))
    entry = _record_shards("gather", full, axis, unit)
    shards = _shards(full, axis)
    if full.is_cuda:
        work = dist.all_gather_single(full, shards[axis.rank], group=axis.group, async_op=True)
        return Handle((_work(work),), entry)
    link = neighbours.link_of(axis)
    if link is None:
        return Handle([_broadcast(shards[i], axis, i) for i in range(axis.size)], entry)
    pulls = [(i, 0, shards[i]) for i in _others(axis)]
    return Handle((neighbours.exchange(link, entry, shards[axis.rank], pulls),), entry)


def reduce_shards(full: torch.Tensor, axis: Axis, unit: str, program: Program | None = None) -> Handle:
    """Sum ``full`` [W x shard_numel] over the axis into this rank's own shard of it; the other shards are left
    undefined.
    """
    if axis.size == 1 or full.numel() == 0:
        return DONE
    if program is not None:
        program.enter(axis, watch.label_of("reduce", unit, full.numel()))
    entry = _record_shards("reduce", full, axis, unit)
    shards = _shards(full, axis)
    if full.is_cuda:
        work = dist.reduce_scatter_single(shards[axis.rank], full, group=axis.group, async_op=True)
        return Handle((_work(work),), entry)
    return _exchange_and_sum(full, shards, axis, entry)


def all_reduce(
    tensor: torch.Tensor, axis: Axis, unit: str, program: Program | None = None, *, maximum: bool = False
) -> Handle:
    """Sum (or take the maximum of) ``tensor`` over the axis, in place."""
    if axis.size == 1 or tensor.numel() == 0:
        return DONE
    if program is not None:
        program.enter(axis, watch.label_of("all-reduce", unit, tensor.numel()))
    nbytes = 2 * tensor.nbytes // axis.size * (axis.size - 1)
    entry = _record(axis, "all-reduce", unit, tensor, nbytes, {} if maximum else {axis.rank - 1: nbytes})
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    return Handle((_work(dist.all_reduce(tensor, op, group=axis.group, async_op=True)),), entry)


def sum_of_two(tensor: torch.Tensor, axis: Axis, unit: str) -> Handle | None:
    """Sum a contiguous CPU tensor over an axis of two ranks in one step, in place, where they read each other's memory;
    else None.
    """
    link = neighbours.link_of(axis) if axis.size == 2 and not tensor.is_cuda else None
    if link is None:
        return None
    other = 1 - axis.rank
    entry = _record(axis, "sum", unit, tensor, tensor.nbytes, {other: tensor.nbytes})
    theirs = torch.empty_like(tensor)
    work = neighbours.exchange(link, entry, tensor, [(other, 0, theirs)])
    # A sum of two has the same bits in either order.
    return Handle((work,), entry, lambda: _add_in_place(tensor, theirs))


def broadcast(tensor: torch.Tensor, axis: Axis, source: int, unit: str) -> Handle:
    """Copy the ``tensor`` of the axis's ``source``-th rank to all its ranks, in place."""
    if axis.size == 1 or tensor.numel() == 0:
        return DONE
    received = {} if axis.rank == source else {source: tensor.nbytes}
    entry = _record(axis, "broadcast", unit, tensor, tensor.nbytes, received)
    return Handle((_broadcast(tensor, axis, source),), entry)


def swap_shards(
    sent: torch.Tensor, received: torch.Tensor, axis: Axis, unit: str, program: Program | None = None
) -> Handle:
    """Give each rank its shard of ``sent`` [W x shard_numel], and get theirs: shard i of ``received`` is rank i's.
    This rank's own shard of ``received`` is left undefined.
    """
    if axis.size == 1 or sent.numel() == 0:
        return DONE
    if program is not None:
        program.enter(axis, watch.label_of("swap", unit, sent.numel()))
    entry = _record_shards("swap", sent, axis, unit)
    link = None if sent.is_cuda else neighbours.link_of(axis)
    if link is None:
        return Handle((_all_to_all(received, sent, axis),), entry)
    parts, start = _shards(received, axis), sent.nbytes // axis.size * axis.rank
    return Handle((neighbours.exchange(link, entry, sent, [(i, start, parts[i]) for i in _others(axis)]),), entry)


def exchange_rows(
    sent: torch.Tensor, received: torch.Tensor, counts: Sequence[Sequence[int]], axis: Axis, unit: str
) -> Handle:
    """Give each rank of the axis its rows of ``sent`` [rows, ...], and get theirs, both in rank order.

    Args:
        counts: ``counts[i][j]`` rows go from rank i to rank j; the same on all ranks.
    """
    rank, row_nbytes = axis.rank, sent.element_size() * math.prod(sent.shape[1:])
    # Counts depend on data, and may differ between axes of one job whose ranks compare what they ran: labels have none.
    taken = {i: counts[i][rank] * row_nbytes for i in _others(axis)}
    given = sum(counts[rank]) - counts[rank][rank]
    entry = _record(axis, "exchange", unit, sent[:0], given * row_nbytes, taken)
    to_me = [row[rank] for row in counts]
    link = None if sent.is_cuda else neighbours.link_of(axis)
    if link is None:
        work = dist.all_to_all_single(received, sent, to_me, list(counts[rank]), group=axis.group, async_op=True)
        return Handle((_work(work),), entry)
    parts = received.split(to_me)
    parts[rank].copy_(sent.split(list(counts[rank]))[rank])
    pulls = [(i, sum(counts[i][:rank]) * row_nbytes, parts[i]) for i in _others(axis) if to_me[i] and row_nbytes]
    source = sent if sent.numel() else sent.new_empty(1)
    return Handle((neighbours.exchange(link, entry, source, pulls),), entry)


def traffic() -> dict[str, int]:
    """Since the last reset: bytes each rank sends per operation ("gather", "reduce", ...), and calls
    ("gather.calls", ...).
    """
    return dict(_traffic)


def traffic_by_edge() -> dict[tuple[int, int], int]:
    """Since the last reset: bytes that this rank takes from each other one, by (their rank, this rank).

    Counted is what each collective hands over, whatever way the transport goes: shards from their owners, and the
    parts of a sum around a ring. Maxima, by which ranks agree on flags, are not counted.
    """
    return dict(_edges)


def reset_traffic() -> None:
    """Start counting anew."""
    _traffic.clear()
    _edges.clear()


def _add_in_place(tensor: torch.Tensor, other: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(other)


def _exchange_and_sum(full: torch.Tensor, shards: list[torch.Tensor], axis: Axis, entry: watch.Entry) -> Handle:
    """Reduce-scatter as all-to-all and a local sum in rank order, so that the result does not depend on timing."""
    own = shards[axis.rank]
    link = neighbours.link_of(axis)
    if link is not None:
        parts = _parts_without_own(own, axis)
        pulls = [(i, own.nbytes * axis.rank, parts[i]) for i in _others(axis)]
        work: watch.Waitable = neighbours.exchange(link, entry, full, pulls)
    elif axis.size == 2:  # a sum of two needs only the other's half: less memory, one copy less
        parts = _parts_without_own(own, axis)
        other = 1 - axis.rank
        split = [own.numel() if i == other else 0 for i in range(2)]
        work = _all_to_all(parts[other], shards[other], axis, split)
    else:
        received = torch.empty_like(full)
        parts = _shards(received, axis)
        work = _all_to_all(received, full, axis)

    def add_in_rank_order() -> None:
        total, *middle, last = parts
        for part in middle:
            total.add_(part)
        torch.add(total, last, out=own)

    return Handle((work,), entry, add_in_rank_order)


def _parts_without_own(own: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """A buffer for each other rank's part of the sum, and this rank's own part in its place."""
    parts = list(own.new_empty((axis.size - 1, own.numel())).unbind(0))
    parts.insert(axis.rank, own)
    return parts


def _all_to_all(
    received: torch.Tensor, sent: torch.Tensor, axis: Axis, split: list[int] | None = None
) -> watch.Waitable:
    return _work(dist.all_to_all_single(received, sent, split, split, group=axis.group, async_op=True))


def _others(axis: Axis) -> list[int]:
    """The other positions along the axis, each rank's from its own on, so that not all read from one at once."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def _shards(full: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    return list(full.view(axis.size, -1).unbind(0))


def _broadcast(tensor: torch.Tensor, axis: Axis, source: int) -> dist.Work:
    return _work(dist.broadcast(tensor, axis.ranks[source], group=axis.group, async_op=True))


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:  # only for a process outside the group, which cannot hold the axis
        raise RuntimeError("this process is not in the axis's process group")
    return work


def _record_shards(operation: str, full: torch.Tensor, axis: Axis, unit: str) -> watch.Entry:
    """Each rank takes one shard from each other."""
    shard_nbytes = full.nbytes // axis.size
    received = dict.fromkeys(_others(axis), shard_nbytes)
    return _record(axis, operation, unit, full, shard_nbytes * (axis.size - 1), received)


def _record(
    axis: Axis, operation: str, unit: str, tensor: torch.Tensor, sent_nbytes: int, received: dict[int, int]
) -> watch.Entry:
    """Count a collective; ``received`` is the bytes that come from each position of the axis."""
    _traffic[operation] += sent_nbytes
    _traffic[f"{operation}.calls"] += 1
    for position, nbytes in received.items():
        _edges[axis.ranks[position], axis.ranks[axis.rank]] += nbytes
    return watch.record(axis, operation, unit, tensor.numel(), on_cuda=tensor.is_cuda)
