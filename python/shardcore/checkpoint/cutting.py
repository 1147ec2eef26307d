"""Where the elements that a rank holds stand in the whole tensor: its shard of its tensor-parallel part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardcore.protocols import Runs, find_pieces


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements that are held in a row, and are elements [start, stop) of the whole tensor or of ``runs`` of it."""

    runs: Runs | None
    start: int
    stop: int
    offset: int
    """Where they begin in what is held."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def cuts(param: torch.Tensor, start: int, stop: int) -> list[Cut]:
    """Elements [start, stop) of this rank's flattened parameter, as elements of the whole one.

    Raises:
        ConfigError: a parameter whose part is several ranges of another dim than the first.
    """
    pieces = find_pieces(param)
    if pieces is None:
        return [Cut(None, start, stop, 0)] if stop > start else []
    found = []
    for first, last, begin, runs in pieces.flat_parts():
        low, high = max(start, first), min(stop, last)
        if low < high:
            found.append(Cut(runs, begin + low - first, begin + high - first, low - start))
    return found


def whole_shape(param: torch.Tensor) -> list[int]:
    """The shape of the whole parameter."""
    pieces = find_pieces(param)
    return list(param.shape if pieces is None else pieces.full_shape)
