"""Which part of a parameter each rank of the tensor axis holds.

A part is a list of ranges along one dim, so that a fused weight gives a rank its heads of the query, the key and the
value. Parts of different ranks may differ in length, and may overlap: a key head that several ranks use is held by all
of them, and a replicated parameter by all ranks as a whole. Nothing is ever padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.mesh import Axis
from shardcore.protocols import Runs

Range = tuple[int, int]


def even_ranges(length: int, num_ranks: int, start: int = 0) -> list[Range]:
    """``length`` cut into one range for each rank, the longer ones first; lengths differ by at most one."""
    base, longer = divmod(length, num_ranks)
    ranges = []
    for rank in range(num_ranks):
        stop = start + base + (rank < longer)
        ranges.append((start, stop))
        start = stop
    return ranges


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """The same elements in the same order, in as few ranges as possible."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


@dataclass(frozen=True, eq=False)
class Pieces:
    """The parts of one parameter; found on it by :func:`shardcore.protocols.find_pieces`."""

    axis: Axis
    full_shape: tuple[int, ...]
    dim: int
    """The dim that is split; 0 for a parameter without dims."""
    ranges: tuple[tuple[Range, ...], ...]
    """For each rank of the axis, in the order in which it holds them. Ranges of one rank do not overlap."""

    @classmethod
    def whole(cls, axis: Axis, shape: Sequence[int]) -> Pieces:
        """Every rank holds everything."""
        return cls(axis, tuple(shape), 0, (((0, shape[0] if shape else 1),),) * axis.size)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds everything, in order."""
        full = ((0, self.full_shape[self.dim] if self.full_shape else 1),)
        return all(ranges == full for ranges in self.ranges)

    def lengths(self) -> list[int]:
        """How long each rank's part is along ``dim``."""
        return [sum(stop - start for start, stop in ranges) for ranges in self.ranges]

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of ``full_shape``: the tensor itself, or a contiguous copy."""
        if self.is_whole:
            return full
        return torch.cat(
            [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges[self.axis.rank]], self.dim
        )

    def assemble(self, local: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor of ``full_shape`` of which every rank gives its part. Collective over the axis."""
        if self.is_whole:
            return local
        lengths = self.lengths()
        gathered = comm.gather_dim(local, self.axis, self.dim, f"parts of {name}", lengths).wait()
        full = local.new_empty(self.full_shape)
        offset = 0
        for start, stop in (each for ranges in self.ranges for each in ranges):
            full.narrow(self.dim, start, stop - start).copy_(gathered.narrow(self.dim, offset, stop - start))
            offset += stop - start
        return full

    def counted_ranges(self) -> list[Range]:
        """The ranges of this rank's part along ``dim`` that no earlier rank holds, so that all ranks together count
        each element once.
        """
        earlier = {each for ranges in self.ranges[: self.axis.rank] for each in ranges}
        counted, offset = [], 0
        for start, stop in self.ranges[self.axis.rank]:
            if (start, stop) not in earlier:
                counted.append((offset, offset + stop - start))
            offset += stop - start
        return counted

    @cached_property
    def _counted_flat_ranges(self) -> list[Range]:
        counted, length = self.counted_ranges(), self.lengths()[self.axis.rank]
        shape = [length if dim == self.dim else extent for dim, extent in enumerate(self.full_shape)]
        if sum(stop - start for start, stop in counted) == length:
            return [(0, prod(shape))]
        if self.dim and counted:
            raise ConfigError(
                f"a parameter of shape {self.full_shape} shares a part of its dim {self.dim} between ranks, which "
                "only dim 0 can; split another dim, or replicate the parameter"
            )
        row = prod(shape[1:])
        return [(start * row, stop * row) for start, stop in counted]

    def counted_flat_ranges(self) -> list[Range]:
        """As :meth:`counted_ranges`, as ranges of the flattened part."""
        return self._counted_flat_ranges

    def flat_parts(self) -> list[tuple[int, int, int, Runs | None]]:
        """Where this rank's flattened part stands in the flattened whole: (start, stop, begin, runs) of each range of
        it, whose elements are those from ``begin`` on, of the whole or of these runs of it.
        """
        ranges, inner = _joined(self.ranges[self.axis.rank]), prod(self.full_shape[self.dim + 1 :])
        outer, extent = prod(self.full_shape[: self.dim]), (*self.full_shape, 1)[self.dim] * inner
        if outer > 1 and all(len(_joined(each)) <= 1 for each in self.ranges):
            length = sum(stop - start for start, stop in ranges) * inner
            runs = (ranges[0][0] * inner, length, extent) if 0 < length < extent else None
            return [(0, outer * length, 0, runs)]
        parts, offset = list[tuple[int, int, int, Runs | None]](), 0
        for row in range(outer):
            for start, stop in ranges:
                end = offset + (stop - start) * inner
                parts.append((offset, end, row * extent + start * inner, None))
                offset = end
        return parts

    def shared_ranges(self) -> list[Range]:
        """The ranges of this rank's part along ``dim`` that other ranks hold, too."""
        others = {each for rank, ranges in enumerate(self.ranges) if rank != self.axis.rank for each in ranges}
        shared, offset = [], 0
        for start, stop in self.ranges[self.axis.rank]:
            if (start, stop) in others:
                shared.append((offset, offset + stop - start))
            offset += stop - start
        return shared
