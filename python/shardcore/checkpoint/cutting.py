"""Where the elements that a rank holds stand in the whole tensor: its shard of its part, if models are split."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardcore.errors import ConfigError
from shardcore.protocols import Runs, splits_of

Parts = list[tuple[int, int, int, Runs | None]]
"""As ``TensorPieces.flat_parts`` gives them."""


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
        ConfigError: a part that cannot be told by ranges of whole rows or columns.
    """
    found = []
    for first, last, begin, runs in _parts_of(param):
        low, high = max(start, first), min(stop, last)
        if low < high:
            found.append(Cut(runs, begin + low - first, begin + high - first, low - start))
    return found


def _parts_of(param: torch.Tensor) -> Parts:
    splits = [split for split in splits_of(param) if not split.is_whole]
    if not splits:
        return [(0, param.numel(), 0, None)]
    if len(splits) == 1:
        return splits[0].flat_parts()
    experts = splits[0].flat_parts()
    if len(experts) != 1 or experts[0][3] is not None:
        raise ConfigError(f"a parameter of shape {tuple(splits[0].full_shape)} is split twice, and not first in a row")
    return [_shifted(part, experts[0][2]) for part in splits[1].flat_parts()]


def _shifted(part: tuple[int, int, int, Runs | None], base: int) -> tuple[int, int, int, Runs | None]:
    """A part of what begins at ``base`` in the whole."""
    first, last, begin, runs = part
    return first, last, begin + (base if runs is None else base // runs[2] * runs[1]), runs
