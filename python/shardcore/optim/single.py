"""Optimizer states, and masters on a disk, of one parameter on this rank: read and replaced, wherever they rest."""

from __future__ import annotations

from typing import Any

import torch

from shardcore import comm
from shardcore.errors import StorageError
from shardcore.optim.pieces import Piece, state_of
from shardcore.optim.portable import Portable
from shardcore.protocols import MASTER, ParameterSlot


class OfOneParameter(Portable):
    """Mixed into the sharded optimizer. What rests on a disk is read, and written, tile by tile. Nothing is collective,
    but a disk that fails ends all ranks.
    """

    def local_state(self, slot: ParameterSlot, *, alone: bool = False) -> dict[str, Any]:
        """This rank's state of one parameter: views of its piece (copies where it rests on a disk), and whatever is one
        value for all; empty where there is none.

        Args:
            alone: values that are one for all must not be those of other parameters too.

        Raises:
            StorageError: states rest on a disk, which failed.
        """
        if alone:
            for piece in [piece for piece in self._pieces_of(slot) if len(piece.slots) > 1]:
                self._split(piece)
        if not self._keeps_masters:
            return state_of(self._pieces, self.inner, slot)
        return {name: value for name, value in self._read(slot).items() if name != MASTER}

    def local_master(self, slot: ParameterSlot) -> torch.Tensor:
        """A copy of this rank's piece of a master weight that rests on a disk, 1-D.

        Raises:
            StorageError: the disk failed.
        """
        master: torch.Tensor = self._read(slot)[MASTER]
        return master

    @torch.no_grad()
    def set_local_state(self, slot: ParameterSlot, name: str, value: torch.Tensor) -> None:
        """Replace this rank's state of this name, which it has: its elements, or the one value for all. ``MASTER``
        means the master weight that rests on a disk; the shard of the parameter follows.

        Raises:
            StorageError: the disk failed.
        """
        slot.group.root.about_to_change()
        if not self._keeps_masters:
            self.local_state(slot, alone=value.dim() == 0)[name].copy_(value)
            return
        if value.dim() == 0:
            self.local_state(slot, alone=True)
            for piece in self._pieces_of(slot):
                self.inner.state[piece.tensor][name].copy_(value)
            return

        def write(piece: Piece) -> None:
            shard, there = self._overlap(slot, piece)
            self._vectors_of(piece)[name][there].copy_(value[shard])
            if name == MASTER:
                piece.group.own[piece.start : piece.stop].copy_(piece.tensor)

        self._each(self._update.visit, slot, write)

    def _read(self, slot: ParameterSlot) -> dict[str, Any]:
        """Copies of what rests on a disk, and values that are one for all."""
        slot.group.root.about_to_change()  # somebody may be reading tiles in the background
        start, stop, _ = slot.group.local_range(slot)
        found: dict[str, Any] = {MASTER: torch.empty(stop - start, dtype=slot.group.master.dtype)}

        def read(piece: Piece) -> None:
            shard, there = self._overlap(slot, piece)
            vectors = self._vectors_of(piece)
            state = self.inner.state.get(piece.tensor, {})
            found.update({name: value for name, value in state.items() if name not in vectors})
            for name, vector in vectors.items():
                found.setdefault(name, torch.empty(stop - start, dtype=vector.dtype))[shard] = vector[there]

        self._each(self._update.read, slot, read)
        return found

    def _each(self, go_through: Any, slot: ParameterSlot, act: Any) -> None:
        try:
            go_through(self._pieces_of(slot), act)
        except StorageError as error:
            comm.report_failure(error)
            raise

    def _pieces_of(self, slot: ParameterSlot) -> list[Piece]:
        return [piece for piece in self._pieces if slot in piece.slots]

    @staticmethod
    def _overlap(slot: ParameterSlot, piece: Piece) -> tuple[slice, slice]:
        """Where the parameter and the piece overlap: in this rank's piece of the parameter, and in the piece."""
        start, stop, offset = slot.group.local_range(slot)
        begin, end = max(offset, piece.start), min(offset + stop - start, piece.stop)
        return slice(begin - offset, end - offset), slice(begin - piece.start, end - piece.start)
