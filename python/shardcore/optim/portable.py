"""Optimizer states under the names of parameters and as ranges of them, as checkpoints for any mesh keep them.

Wherever states rest, they are shown and filled piece by piece: those on a disk are in memory for one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardcore.optim.pieces import Piece
from shardcore.optim.probe import states_of, values_of
from shardcore.optim.tiled import TiledUpdate
from shardcore.optim.update import Update
from shardcore.protocols import MASTER, Fill, HeldPiece, ParameterSlot, ShardedOptimizerMark

Values = dict[str, Any]


class Portable(ShardedOptimizerMark):
    """Mixed into the sharded optimizer."""

    inner: torch.optim.Optimizer
    _pieces: list[Piece]
    _update: Update
    _begins_with_states: bool
    """The optimizer makes states before the first update."""

    def held_pieces(self) -> list[HeldPiece]:
        """All that it keeps on this rank, in the order in which :meth:`read_pieces` shows it. Not collective."""
        return [held for piece in self._update.order(self._pieces) for held in self._held_of(piece)]

    def read_pieces(self, act: Callable[[HeldPiece, dict[str, torch.Tensor]], None]) -> None:
        """Call ``act(piece, {name: values [stop - start]})`` for each. Not collective.

        Raises:
            StorageError: states rest on a disk, which failed.
        """

        def show(piece: Piece) -> None:
            vectors = self._vectors_of(piece)
            for held in self._held_of(piece):
                where = _within(held, piece)
                act(held, {name: vectors[name][where] for name in held.states})

        self._update.read(self._update.order(self._pieces), show)

    def kept_states(self) -> list[tuple[list[str], list[str]]]:
        """For each parameter group, the names of states of an element, and of values that are one for all."""
        count = range(len(self.inner.param_groups))
        kept = [(states_of(self.inner, i, torch.float32), values_of(self.inner, i, torch.float32)) for i in count]
        return [
            (list(states), [name for name, value in values.items() if value is not None]) for states, values in kept
        ]

    @torch.no_grad()
    def write_pieces(
        self, values: Callable[[ParameterSlot], Values | None] | None, fill: Callable[[list[Fill]], None]
    ) -> None:
        """Replace all states. Not collective.

        Args:
            values: what is one value for all elements of a parameter; None for a parameter that has no state yet.
                Without it, states stay, and only master weights that rest on a disk are replaced.
            fill: fills the memory of states of elements, and of master weights where these are not here otherwise; of
                all pieces at once, or of a tile where they rest on a disk.
        """
        for piece in list(self._pieces) if values is not None else []:
            wanted = [values(slot) for slot in piece.slots] if values is not None else []
            if any(other != wanted[0] for other in wanted[1:]):
                self._split(piece)
        kinds: dict[tuple[int, torch.dtype], tuple[dict[str, torch.dtype], Values]] = {}
        in_memory: list[Fill] = []

        def write(piece: Piece) -> None:
            vectors: dict[str, torch.Tensor] = {}
            if values is not None:
                kind = (piece.options, piece.tensor.dtype)
                if kind not in kinds:
                    kinds[kind] = states_of(self.inner, *kind), dict(values_of(self.inner, *kind))
                vectors = self._renew(piece, values(piece.slots[0]), *kinds[kind])
            if self._keeps_masters:
                vectors[MASTER] = piece.tensor
            parts = [(held, _within(held, piece)) for held in self._held_of(piece)]
            fills = [
                Fill(h.slot, name, h.start, h.stop, vectors[name][where]) for h, where in parts for name in vectors
            ]
            if not self._keeps_masters:
                in_memory.extend(fills)
                return
            fill(fills)
            piece.group.own[piece.start : piece.stop].copy_(piece.tensor)

        if values is not None:
            self._update.recover()
        self._update.visit(list(self._pieces), write)
        fill(in_memory)

    def _split(self, piece: Piece) -> list[Piece]:
        raise NotImplementedError

    @property
    def _keeps_masters(self) -> bool:
        """Master weights rest on a disk with the states, and nowhere else."""
        return isinstance(self._update, TiledUpdate)

    def _renew(
        self, piece: Piece, wanted: Values | None, states: dict[str, torch.dtype], forms: Values
    ) -> dict[str, torch.Tensor]:
        """Give the piece the values that are one for all; returns the memory of the others, to be filled."""
        present = self.inner.state.get(piece.tensor, {})
        if wanted is None:
            if not self._is_as_made(present):
                self.inner.state.pop(piece.tensor, None)
            return {}
        numel = piece.stop - piece.start
        vectors = {name: _memory(present.get(name), piece.tensor, numel, dtype) for name, dtype in states.items()}
        options = self.inner.param_groups[piece.options]
        device = piece.tensor.device if options.get("capturable") or options.get("fused") else torch.device("cpu")
        others = {name: _as_kept(value, forms.get(name), device) for name, value in wanted.items()}
        self.inner.state[piece.tensor] = {**others, **vectors}
        return dict(vectors)

    def _is_as_made(self, state: Values) -> bool:
        """Whether a parameter's state is that from before its first update, which may be more than nothing."""
        return state["step"] == 0 if "step" in state else self._begins_with_states

    def _held_of(self, piece: Piece) -> list[HeldPiece]:
        """One for each parameter of the piece."""
        vectors = self._vectors_of(piece)
        state = self.inner.state.get(piece.tensor, {})
        values = {name: value for name, value in state.items() if name not in vectors}
        dtypes = {name: value.dtype for name, value in vectors.items()}
        found = []
        for slot in piece.slots:
            start, stop, offset = piece.group.local_range(slot)
            begin, end = max(offset, piece.start), min(offset + stop - start, piece.stop)
            first = start + begin - offset
            found.append(HeldPiece(slot, piece.options, first, first + end - begin, dtypes, values))
        return found

    def _vectors_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        state = self.inner.state.get(piece.tensor, {})
        vectors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1}
        return {MASTER: piece.tensor, **vectors} if self._keeps_masters else vectors


def _within(held: HeldPiece, piece: Piece) -> slice:
    """Where a parameter's elements lie in its piece."""
    start, _, offset = piece.group.local_range(held.slot)
    first = offset + held.start - start - piece.start
    return slice(first, first + held.stop - held.start)


def _memory(present: object, like: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory that a state has, so that it stays in its pool; else zeros."""
    if isinstance(present, torch.Tensor) and present.dim() == 1 and present.numel() == numel:
        return present
    return torch.zeros(numel, dtype=dtype, device=like.device)


def _as_kept(value: Any, form: object, device: torch.device) -> Any:
    """A value from a checkpoint in the form in which this optimizer keeps it: a number, or a tensor of one."""
    if isinstance(form, torch.Tensor) and value is not None:
        return torch.as_tensor(value).to(device, form.dtype).reshape(form.shape).clone()
    if form is not None and isinstance(value, torch.Tensor):
        return value.item()
    return value.clone() if isinstance(value, torch.Tensor) else value
