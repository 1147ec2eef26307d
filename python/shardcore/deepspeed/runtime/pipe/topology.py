"""``deepspeed.runtime.pipe.topology``: which rank has which coordinates."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from shardcore.errors import ConfigError

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """Ranks on a grid of named axes, the last one changing fastest.

    Args:
        axes: their names, outermost first.
        dims: how many coordinates each has.

    Raises:
        ConfigError: not as many names as sizes, a name twice, or a size below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ConfigError(
                f"topology of axes {list(axes)} and sizes {list(dims)}: expected distinct names and one size of at "
                "least 1 for each"
            )
        self.axes = list(axes)
        self.dims = list(dims)
        make: Any = namedtuple
        self.ProcessCoord = make("ProcessCoord", axes)
        grid = itertools.product(*(range(dim) for dim in dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*coord): rank for rank, coord in enumerate(grid)}

    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Names of the axes, outermost first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 for one that the topology does not have."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """The rank at a coordinate on every axis.

        Raises:
            ConfigError: an axis is missing or unknown, or the coordinate is outside.
        """
        if set(coord) != set(self.axes):
            raise ConfigError(f"get_rank({coord}): expected a coordinate for each of {self.axes}")
        place = self.ProcessCoord(**coord)
        if place not in self.mapping:
            raise ConfigError(f"get_rank({coord}): outside the topology of sizes {self.dims}")
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, by name.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < self.world_size():
            raise ConfigError(f"get_coord({rank}): the topology has ranks 0 to {self.world_size() - 1}")
        return next(coord for coord, found in self.mapping.items() if found == rank)

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A name of a rank made of its coordinates, such as ``model_00``."""
        coord = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def filter_match(self, **coord: int) -> list[int]:
        """The ranks that have these coordinates, in order."""
        return sorted(
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == value for axis, value in coord.items())
        )

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate on ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ on ``axis`` alone; none for an axis that the topology does not have."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        sizes = [range(self.get_dim(name)) for name in others]
        return [self.filter_match(**dict(zip(others, coord, strict=True))) for coord in itertools.product(*sizes)]


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages outermost, replicas of a stage side by side."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """As :class:`PipeDataParallelTopology`, with tensor-parallel ranks innermost."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
