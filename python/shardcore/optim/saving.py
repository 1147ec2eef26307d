"""The state of a sharded optimizer on this rank, to continue on the same mesh to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.optim.pieces import Piece, split
from shardcore.optim.targets import Options
from shardcore.protocols import ShardedRoot

Place = tuple[tuple[str, int, int], ...]
"""What a piece holds: (name of a parameter, start, stop) for each, ranges of the flattened parameters."""


def save(pieces: Sequence[Piece], inner: torch.optim.Optimizer, groups: Sequence[Options]) -> dict[str, Any]:
    """State, options, places and master weights of the pieces. Tensors are not copied."""
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    numbers = [[i for i, piece in enumerate(pieces) if piece.options == g] for g in range(len(groups))]
    return {
        "state": {i: inner.state[piece.tensor] for i, piece in enumerate(pieces) if piece.tensor in inner.state},
        "param_groups": [{**group, "params": indices} for group, indices in zip(options, numbers, strict=True)],
        "pieces": [_place(piece) for piece in pieces],
        "masters": {i: piece.tensor for i, piece in enumerate(pieces) if piece.group.master is not piece.group.own},
    }


def restore(
    pieces: list[Piece],
    inner: torch.optim.Optimizer,
    groups: Sequence[Options],
    roots: Sequence[ShardedRoot],
    saved: dict[str, Any],
) -> None:
    """Put a saved state in place; checked on all ranks before anything changes. Collective over the data-parallel axis.

    Raises:
        ConfigError: the saved state does not fit, on this rank or another.
    """
    wanted = [tuple((str(name), int(a), int(b)) for name, a, b in place) for place in saved.get("pieces", ())]
    problem = _problem(pieces, wanted, groups, saved)
    everywhere = comm.exchange(problem, roots[0].data_axis, "optimizer state")
    for rank, theirs in zip(roots[0].data_axis.ranks, everywhere, strict=True):
        if theirs is not None:
            raise ConfigError(f"load_state_dict of an optimizer: {problem or f'{theirs} (rank {rank})'}")
    _cut_as(pieces, wanted, inner)
    for i, piece in enumerate(pieces):
        state = saved["state"].get(i, saved["state"].get(str(i), {}))
        inner.state.pop(piece.tensor, None)
        if state:
            inner.state[piece.tensor] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    for group, options in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    _restore_masters(pieces, roots, saved.get("masters", {}))


def _restore_masters(pieces: Sequence[Piece], roots: Sequence[ShardedRoot], masters: dict[Any, torch.Tensor]) -> None:
    for group in [group for root in roots for group in root.groups]:
        group.adopt_edits_if_any()  # what was loaded into the parameters before stays, where there is no master
    with torch.no_grad():
        for i, piece in enumerate(pieces):
            master = masters.get(i, masters.get(str(i)))
            if master is not None:
                piece.tensor.copy_(master)
    for group in [group for root in roots for group in root.groups if group.trainable]:
        if group.master is not group.own:
            group.publish()


def _place(piece: Piece) -> Place:
    ranges = ((slot, *piece.group.local_range(slot)[:2]) for slot in piece.slots)
    return tuple((slot.name, start, stop) for slot, start, stop in ranges)


def _cut_as(pieces: list[Piece], wanted: Sequence[Place], inner: torch.optim.Optimizer) -> None:
    """Cut pieces that were cut when the state was saved."""
    for piece in list(pieces):
        if _place(piece) not in wanted:
            position = pieces.index(piece)
            pieces[position : position + 1] = split(piece, inner)


def _problem(
    pieces: Sequence[Piece], wanted: Sequence[Place], groups: Sequence[Options], saved: dict[str, Any]
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
    if any(theirs[item] > num_items for item, num_items in mine.items()):
        return "this optimizer has met parameters without a gradient since; load the state into a new optimizer"
    return None
