"""The saved form of states that rest on a disk: one piece a parameter, so that they load wherever states rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardcore.optim.pieces import Piece
from shardcore.optim.tiled import TiledUpdate
from shardcore.protocols import ParameterSlot

State = dict[str, Any]
Place = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of one parameter, or what one tile has of it, with its state and masters."""

    slot: ParameterSlot
    options: int
    start: int
    """Where it begins in the shard."""
    state: State
    master: torch.Tensor


def read_parts(update: TiledUpdate, pieces: Sequence[Piece]) -> list[Part]:
    """Copies of everything, one part for each parameter, in the order of the plan."""
    found: dict[ParameterSlot, list[Part]] = {}

    def read(piece: Piece) -> None:
        state = update.inner.state[piece.tensor]
        for slot in piece.slots:
            begin, end = _span(slot, piece)
            where = slice(begin - piece.start, end - piece.start)
            cut = {key: value[where].clone() if _is_vector(value) else _copied(value) for key, value in state.items()}
            found.setdefault(slot, []).append(Part(slot, piece.options, begin, cut, piece.tensor[where].clone()))

    update.read(pieces, read)
    order = list(dict.fromkeys(slot for piece in pieces for slot in piece.slots))
    return [_joined(sorted(found[slot], key=lambda part: part.start)) for slot in order]


def write_parts(
    update: TiledUpdate,
    pieces: list[Piece],
    wanted: Sequence[Place],
    saved: dict[str, Any],
    split: Callable[[Piece], list[Piece]],
) -> None:
    """Put a saved state, whose pieces lie at ``wanted``, into the tiles, and masters into the shards."""
    sources = _sources(pieces, wanted)
    states = [_entry(saved["state"], i) or {} for i in range(len(wanted))]
    masters = [_entry(saved.get("masters", {}), i) for i in range(len(wanted))]
    for piece in list(pieces):
        scalars = [_scalars(states[sources[slot][0]]) for slot in piece.slots]
        if any(not _equal(other, scalars[0]) for other in scalars[1:]):
            position = pieces.index(piece)
            pieces[position : position + 1] = split(piece)

    def write(piece: Piece) -> None:
        state = update.inner.state[piece.tensor]
        for key in state.keys() - states[sources[piece.slots[0]][0]].keys():
            del state[key]
        for slot in piece.slots:
            number, origin = sources[slot]
            begin, end = _span(slot, piece)
            where, there = slice(begin - piece.start, end - piece.start), slice(begin - origin, end - origin)
            for key, value in states[number].items():
                if not _is_vector(value):
                    state[key] = _copied(value)
                    continue
                if not _is_vector(state.get(key)):
                    state[key] = value.new_zeros(piece.stop - piece.start)
                state[key][where].copy_(value[there])
            master = masters[number]
            if master is not None:
                piece.tensor[where].copy_(master[there])
        piece.group.own[piece.start : piece.stop].copy_(piece.tensor)

    update.recover()
    update.visit(pieces, write)


def _sources(pieces: Sequence[Piece], wanted: Sequence[Place]) -> dict[ParameterSlot, tuple[int, int]]:
    """For each parameter, the number of the saved piece that has it, and where that piece begins in the shard."""
    slots = {slot.name: (slot, *piece.group.local_range(slot)) for piece in pieces for slot in piece.slots}
    found = {}
    for number, place in enumerate(wanted):
        origin = slots[place[0][0]][3]
        found.update({slots[name][0]: (number, origin) for name, _, _ in place})
    return found


def _span(slot: ParameterSlot, piece: Piece) -> tuple[int, int]:
    """What the piece has of the parameter, as a range of the shard."""
    start, stop, offset = piece.group.local_range(slot)
    return max(offset, piece.start), min(offset + stop - start, piece.stop)


def _joined(parts: list[Part]) -> Part:
    first = parts[0]
    if len(parts) == 1:
        return first
    state = {
        key: torch.cat([part.state[key] for part in parts]) if _is_vector(value) else value
        for key, value in first.state.items()
    }
    return Part(first.slot, first.options, first.start, state, torch.cat([part.master for part in parts]))


def _entry(entries: dict[Any, Any], number: int) -> Any:
    return entries.get(number, entries.get(str(number)))


def _scalars(state: State) -> State:
    return {key: value for key, value in state.items() if not _is_vector(value)}


def _equal(first: State, second: State) -> bool:
    def same(a: object, b: object) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())


def _is_vector(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
