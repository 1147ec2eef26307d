"""Saved optimizer state, brought into the pieces that an optimizer has now.

The same shards may be cut otherwise: at the tiles of an offload, or where a parameter once had no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardcore.errors import ConfigError
from shardcore.optim.pieces import Piece

State = dict[str, Any]
Place = tuple[int, int, int]
"""(index of the group in its model, start, stop) of a piece."""

_MISMATCH = "optimizer state of another model, mesh or set of parameter groups; load it where it was saved"


@dataclass(frozen=True, slots=True)
class _Saved:
    start: int
    stop: int
    state: State


def place_of(piece: Piece) -> Place:
    """Where a piece lies, as a saved state says it."""
    return piece.group.index, piece.start, piece.stop


def states_for(
    pieces: Sequence[Piece], places: Sequence[Place], states: Sequence[State], split: Callable[[Piece], list[Piece]]
) -> dict[Piece, State]:
    """The saved state of each piece; ``split`` cuts one whose parameters have not made the same steps.

    Raises:
        ConfigError: the saved state is that of other shards.
    """
    saved: dict[int, list[_Saved]] = {}
    for number, (_, start, stop), state in zip(_groups(places), places, states, strict=True):
        saved.setdefault(number, []).append(_Saved(start, stop, state))
    numbers = list(_groups([place_of(piece) for piece in pieces]))
    if len(set(numbers)) != len(saved):
        raise ConfigError(_MISMATCH)
    found: dict[Piece, State] = {}
    for number, piece in zip(numbers, list(pieces), strict=True):
        sources = saved[number]
        parts = [piece] if _agree(_inside(piece, sources)) else split(piece)
        found |= {part: _assemble(part, _inside(part, sources)) for part in parts}
    return found


def _groups(places: Sequence[Place]) -> Iterator[int]:
    """Numbers groups in order: several models have groups of the same index, one behind the other."""
    number, last = -1, (-1, 0)
    for index, start, stop in places:
        if index != last[0] or start < last[1]:
            number += 1
        last = (index, stop)
        yield number


def _inside(piece: Piece, sources: list[_Saved]) -> list[_Saved]:
    return [source for source in sources if source.start < piece.stop and source.stop > piece.start]


def _agree(sources: list[_Saved]) -> bool:
    """Whether the states may become one: all but the vectors are equal."""
    first, *others = [{k: v for k, v in s.state.items() if not _is_vector(v, s)} for s in sources] or [{}]
    return all(
        other.keys() == first.keys() and all(_equal(first[key], other[key]) for key in first) for other in others
    )


def _equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def _is_vector(value: object, source: _Saved) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == source.stop - source.start


def _assemble(piece: Piece, sources: list[_Saved]) -> State:
    covered = torch.zeros(piece.stop - piece.start, dtype=torch.bool)
    for source in sources:
        covered[max(source.start - piece.start, 0) : source.stop - piece.start] = True
    for slot in piece.slots:
        start, stop, offset = piece.group.local_range(slot)
        if not covered[max(offset - piece.start, 0) : max(offset + stop - start - piece.start, 0)].all():
            raise ConfigError(_MISMATCH)
    state: State = {}
    for source in sources:
        begin, end = max(source.start, piece.start), min(source.stop, piece.stop)
        for name, value in source.state.items():
            if not _is_vector(value, source):
                state[name] = value
                continue
            if name not in state:
                state[name] = torch.zeros(piece.stop - piece.start, dtype=value.dtype, device=value.device)
            state[name][begin - piece.start : end - piece.start] = value[begin - source.start : end - source.start]
    return state
