"""This rank's master weights, cut into the few tensors that an optimizer works on.

Neighbouring parameters of one group and one set of options are one piece, so an update is a few large tensors however
many parameters a model has. A parameter without a gradient must be skipped (no weight decay, no moment update); a piece
that holds such a parameter is cut into its parameters the first time this happens, with its optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from shardcore.protocols import ParameterSlot, ShardedGroup


@dataclass(eq=False, slots=True)
class Piece:
    """A range of a group's shard whose parameters share options; ``tensor`` is a view of the group's masters."""

    group: ShardedGroup
    options: int
    """Index of the optimizer's parameter group."""
    start: int
    stop: int
    slots: tuple[ParameterSlot, ...]
    tensor: torch.Tensor

    def gradient(self) -> torch.Tensor:
        """This piece's part of the reduced gradient, in the masters' dtype."""
        return self.group.grad_shard[self.start : self.stop].to(self.tensor.dtype)


def cut_into_pieces(
    groups: Sequence[ShardedGroup], options_of: dict[torch.nn.Parameter, int], tile_numel: int | None = None
) -> list[Piece]:
    """The pieces of all trainable groups, in order; parameters that the optimizer does not hold are left out.

    With ``tile_numel`` pieces are cut where tiles end: at multiples of it in their shard.
    """
    pieces = []
    for group in groups:
        if not group.trainable:
            continue
        here = [item for slot in group.slots for item in _cut_at_tiles(slot, group.local_range(slot), tile_numel)]
        keys = ((options_of.get(slot.param), start // tile_numel if tile_numel else 0) for slot, start, _ in here)
        for (options, _), run in groupby(zip(keys, here, strict=True), key=lambda item: item[0]):
            if options is None:
                continue
            members = [item for _, item in run]
            pieces.append(_piece(group, options, members[0][1], members[-1][2], tuple(slot for slot, _, _ in members)))
    return pieces


def _cut_at_tiles(
    slot: ParameterSlot, local: tuple[int, int, int], tile_numel: int | None
) -> list[tuple[ParameterSlot, int, int]]:
    """(slot, start, stop) in the shard for each tile that has a part of the parameter."""
    start, stop, offset = local
    end = offset + stop - start
    cuts = [offset]
    if tile_numel is not None:
        cuts.extend(range((offset // tile_numel + 1) * tile_numel, end, tile_numel))
    return [(slot, begin, finish) for begin, finish in zip(cuts, [*cuts[1:], end], strict=True) if finish > begin]


def split(piece: Piece, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Cut a piece into one per parameter, with its optimizer state, in place in ``optimizer``."""
    parts = []
    for slot in piece.slots:
        start, stop, offset = piece.group.local_range(slot)
        begin, finish = max(offset, piece.start), min(offset + stop - start, piece.stop)
        parts.append(_piece(piece.group, piece.options, begin, finish, (slot,)))
    state = optimizer.state.pop(piece.tensor, {})
    for part in parts:
        if state:
            optimizer.state[part.tensor] = {key: _cut(value, piece, part) for key, value in state.items()}
    params = optimizer.param_groups[piece.options]["params"]
    position = next(i for i, tensor in enumerate(params) if tensor is piece.tensor)
    params[position : position + 1] = [part.tensor for part in parts]
    return parts


def state_of(pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, slot: ParameterSlot) -> dict[str, Any]:
    """This rank's state of one parameter: views of its elements, and whatever is one value for the piece."""
    start, stop, offset = slot.group.local_range(slot)
    for piece in pieces:
        if slot not in piece.slots or stop == start:
            continue
        part = _piece(piece.group, piece.options, offset, offset + stop - start, (slot,))
        return {
            key: _cut(value, piece, part, copy=False) for key, value in optimizer.state.get(piece.tensor, {}).items()
        }
    return {}


def _piece(group: ShardedGroup, options: int, start: int, stop: int, slots: tuple[ParameterSlot, ...]) -> Piece:
    return Piece(group, options, start, stop, slots, group.master[start:stop])


def _cut(value: object, whole: Piece, part: Piece, *, copy: bool = True) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == whole.stop - whole.start and value.dim() == 1:
        return value[part.start - whole.start : part.stop - whole.start]
    return value.clone() if copy else value
