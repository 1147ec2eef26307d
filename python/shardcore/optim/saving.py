"""The state of a sharded optimizer on this rank, to continue on the same mesh to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.optim.pieces import Piece, split
from shardcore.optim.saving_tiles import read_parts, write_parts
from shardcore.optim.targets import Options
from shardcore.optim.tiled import TiledUpdate
from shardcore.optim.update import Update
from shardcore.protocols import ParameterSlot, ShardedRoot

Place = tuple[tuple[str, int, int], ...]
"""What a piece holds: (name of a parameter, start, stop) for each, ranges of the flattened parameters."""


def save(pieces: Sequence[Piece], update: Update, groups: Sequence[Options]) -> dict[str, Any]:
    """State, options, places and master weights of the pieces. Tensors are not copied, but those on a disk are."""
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    if isinstance(update, TiledUpdate):
        parts = read_parts(update, pieces)
        return {
            "state": {i: part.state for i, part in enumerate(parts) if part.state},
            "param_groups": _with_numbers(options, [part.options for part in parts]),
            "pieces": [(_item(part.slot),) for part in parts],
            "masters": {i: part.master for i, part in enumerate(parts)},
        }
    inner = update.inner
    return {
        "state": {i: inner.state[piece.tensor] for i, piece in enumerate(pieces) if piece.tensor in inner.state},
        "param_groups": _with_numbers(options, [piece.options for piece in pieces]),
        "pieces": [_place(piece) for piece in pieces],
        "masters": {i: piece.tensor for i, piece in enumerate(pieces) if piece.group.has_masters},
    }


def restore(
    pieces: list[Piece],
    update: Update,
    groups: Sequence[Options],
    roots: Sequence[ShardedRoot],
    saved: dict[str, Any],
) -> None:
    """Put a saved state in place; checked on all ranks before anything changes. Collective over the data-parallel axis.

    Raises:
        ConfigError: the saved state does not fit, on this rank or another.
    """
    wanted = [tuple((str(name), int(a), int(b)) for name, a, b in place) for place in saved.get("pieces", ())]
    problem = _problem(pieces, wanted, groups, saved, cuts_freely=isinstance(update, TiledUpdate))
    everywhere = comm.exchange(problem, roots[0].data_axis, "optimizer state")
    for rank, theirs in zip(roots[0].data_axis.ranks, everywhere, strict=True):
        if theirs is not None:
            raise ConfigError(f"load_state_dict of an optimizer: {problem or f'{theirs} (rank {rank})'}")
    if not isinstance(update, TiledUpdate):
        _cut_as(pieces, wanted, update.inner)
        for i, piece in enumerate(pieces):
            state = saved["state"].get(i, saved["state"].get(str(i), {}))
            _restore_state(update.inner, piece, state)
    for group, options in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    if isinstance(update, TiledUpdate):
        for sharded in [group for root in roots for group in root.groups]:
            sharded.adopt_edits_if_any()
        write_parts(update, pieces, wanted, saved, lambda piece: split(piece, update.inner))
        for sharded in [group for root in roots for group in root.groups if group.trainable]:
            sharded.publish(copied=True)
        return
    _restore_masters(pieces, roots, saved.get("masters", {}))


def _restore_state(inner: torch.optim.Optimizer, piece: Piece, state: dict[str, Any]) -> None:
    """Take a saved state over, in the memory that the present one has."""
    present = inner.state.pop(piece.tensor, {})
    if not state:
        return
    taken: dict[str, Any] = {}
    for key, value in state.items():
        here = present.get(key)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
            taken[key] = here.copy_(value)
        else:
            taken[key] = value.clone() if isinstance(value, torch.Tensor) else value
    inner.state[piece.tensor] = taken


def _restore_masters(pieces: Sequence[Piece], roots: Sequence[ShardedRoot], masters: dict[Any, torch.Tensor]) -> None:
    for group in [group for root in roots for group in root.groups]:
        group.adopt_edits_if_any()  # what was loaded into the parameters before stays, where there is no master
    with torch.no_grad():
        for i, piece in enumerate(pieces):
            master = masters.get(i, masters.get(str(i)))
            if master is not None:
                piece.tensor.copy_(master)
    for group in [group for root in roots for group in root.groups if group.trainable]:
        if group.has_masters:
            group.publish()


def _with_numbers(options: Sequence[Options], of_pieces: Sequence[int]) -> list[Options]:
    """Options of each group, with the numbers of its pieces."""
    numbers = [[i for i, group in enumerate(of_pieces) if group == g] for g in range(len(options))]
    return [{**group, "params": indices} for group, indices in zip(options, numbers, strict=True)]


def _place(piece: Piece) -> Place:
    return tuple(_item(slot) for slot in piece.slots)


def _item(slot: ParameterSlot) -> tuple[str, int, int]:
    start, stop, _ = slot.group.local_range(slot)
    return slot.name, start, stop


def _cut_as(pieces: list[Piece], wanted: Sequence[Place], inner: torch.optim.Optimizer) -> None:
    """Cut pieces that were cut when the state was saved."""
    for piece in list(pieces):
        if _place(piece) not in wanted:
            position = pieces.index(piece)
            pieces[position : position + 1] = split(piece, inner)


def _problem(
    pieces: Sequence[Piece],
    wanted: Sequence[Place],
    groups: Sequence[Options],
    saved: dict[str, Any],
    *,
    cuts_freely: bool,
) -> str | None:
    """Why the saved state does not fit, if it does not."""
    missing = {"state", "param_groups", "pieces"} - set(saved)
    if missing:
        return f"the state lacks {', '.join(sorted(missing))}; load what state_dict() of a sharded optimizer gave"
    if len(saved["param_groups"]) != len(groups):
        return f"it has {len(saved['param_groups'])} parameter groups, this optimizer {len(groups)}"
    mine = {item: len(_place(piece)) for piece in pieces for item in _place(piece)}
    theirs = {item: len(place) for place in wanted for item in place}
    if list(mine) != list(theirs):
        odd = next((item for item in [*mine, *theirs] if (item in mine) != (item in theirs)), "their order")
        return (
            f"it is the state of another model, mesh or set of parameter groups (first difference: {odd}); a state "
            "loads on the mesh where it was saved"
        )
    if not cuts_freely and any(theirs[item] > num_items for item, num_items in mine.items()):
        return "this optimizer has met parameters without a gradient since; load the state into a new optimizer"
    return None
