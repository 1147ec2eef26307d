"""Updates of states that rest on a disk, tile by tile.

A tile is a range of a group's shard, ``[masters | state | state ...]``. While it is in host memory, the pieces inside
it and their states in the inner optimizer are views of it; at other times they have no elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardcore.errors import StateError
from shardcore.offload import TileSpec, TileStore
from shardcore.optim.cpu import CPUOptimizer
from shardcore.optim.hosted import writes_parameters
from shardcore.optim.pieces import Piece
from shardcore.optim.probe import states_of
from shardcore.optim.update import Update, step_pieces
from shardcore.protocols import ShardedGroup, ShardedRoot


@dataclass(eq=False, slots=True)
class _Tile:
    """A range of a group's shard."""

    group: ShardedGroup
    start: int
    stop: int
    states: dict[str, torch.dtype] = field(default_factory=dict)
    """The states of all pieces inside."""
    num_edits: int = 0
    """The masters are those of this many edits of the group; 0 before the first."""

    def range_of(self, piece: Piece) -> slice:
        """Where the piece lies in the tile's parts."""
        return slice(piece.start - self.start, piece.stop - self.start)


class TiledUpdate(Update):
    """Masters and states rest on a disk; tiles go through host memory, in opposite directions by turns."""

    def __init__(self, inner: torch.optim.Optimizer, pieces: Sequence[Piece], root: ShardedRoot) -> None:
        """Lay out the tiles of these pieces and make their file. Collective over the data-parallel axis.

        Raises:
            StorageError: the disk or host memory is too small, with the arithmetic; or the folder cannot be written.
        """
        super().__init__(inner)
        self._tile_numel: int = root.offload.tile_numel
        self._tiles = self._cover(pieces)
        self._number = {self._key(tile.group, tile.start): i for i, tile in enumerate(self._tiles)}
        specs = [TileSpec(t.stop - t.start, (t.group.master.dtype, *t.states.values())) for t in self._tiles]
        self.store = TileStore(root.offload, specs, root.data_axis)
        self._backwards = False

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update these pieces; others stay as they are.

        Raises:
            StorageError: the disk failed.
        """

        def update(inside: list[Piece]) -> None:
            self._link(inside)
            step_pieces(self.inner, inside)

        self._each_tile(pieces, update, writes=True)

    def visit(self, pieces: Sequence[Piece], act: Callable[[Piece], None]) -> None:
        """Call ``act`` for each piece while its tensor and its states are in memory; what it changes is kept."""
        self._each_tile(pieces, lambda inside: _each(inside, act), writes=True)

    def read(self, pieces: Sequence[Piece], act: Callable[[Piece], None]) -> None:
        """As :meth:`visit`, for an ``act`` that changes nothing. It does not touch parameters either, so it may run
        beside a forward and a backward, which bring them from the disk and give their place to others.
        """
        self._each_tile(pieces, lambda inside: _each(inside, act), writes=False)

    def order(self, pieces: Sequence[Piece]) -> list[Piece]:
        """These pieces as the next :meth:`visit` of them will come by: tile by tile, in the direction that is due."""
        inside = self._inside(pieces)
        return [piece for number in sorted(inside, reverse=self._backwards) for piece in inside[number]]

    def recover(self) -> None:
        """All states are about to be set anew: after a failure of the disk, masters too are taken from parameters."""
        if self.store.failed:
            self.store.forget()
            for tile in self._tiles:
                tile.num_edits = 0

    def writes_parameters(self, group: ShardedGroup) -> bool:
        """Always: masters are not there later."""
        return True

    def _each_tile(self, pieces: Sequence[Piece], act: Callable[[list[Piece]], None], *, writes: bool) -> None:
        inside = self._inside(pieces)

        def on_tile(number: int, parts: list[torch.Tensor]) -> bool:
            tile = self._tiles[number]
            had_edits = self._take_edits(tile, parts[0])
            self._bind(tile, inside[number], parts)
            try:
                act(inside[number])
                if writes:
                    self._keep(tile, inside[number], parts)
            finally:
                self._unbind(inside[number])
            return had_edits or writes

        self.store.run(sorted(inside, reverse=self._backwards), on_tile, is_step=writes)
        self._backwards = not self._backwards

    def _inside(self, pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
        """The pieces in each tile, by its number."""
        inside: dict[int, list[Piece]] = {}
        for piece in pieces:
            inside.setdefault(self._number[self._key(piece.group, piece.start)], []).append(piece)
        return inside

    def _take_edits(self, tile: _Tile, master: torch.Tensor) -> bool:
        """Bring the masters of a tile up to date with edits of the parameters; returns whether there were any."""
        if tile.num_edits == tile.group.num_edits:
            return False
        own = tile.group.copy_of_own(tile.start, tile.stop).to(master.device)
        if tile.num_edits:
            # Values that masters round to were not edited: there they keep their full precision.
            edited = master.to(own.dtype) != own
            torch.where(edited, own.to(master.dtype), master, out=master)
        else:
            master.copy_(own)  # temporaries of all tiles, one after the other, would leave the heap in pieces
        tile.num_edits = tile.group.num_edits
        return True

    def _bind(self, tile: _Tile, pieces: list[Piece], parts: list[torch.Tensor]) -> None:
        master, states = parts[0], dict(zip(tile.states, parts[1:], strict=True))
        for piece in pieces:
            where = tile.range_of(piece)
            piece.tensor.data = master[where]
            state = self.inner.state[piece.tensor]
            state.update({name: states[name][where] for name, value in state.items() if _is_away(value)})

    def _keep(self, tile: _Tile, pieces: list[Piece], parts: list[torch.Tensor]) -> None:
        """Bring what the optimizer made anew into the tile, and the masters into the parameters."""
        states = dict(zip(tile.states, parts[1:], strict=True))
        for piece in pieces:
            where = tile.range_of(piece)
            for name, value in self.inner.state[piece.tensor].items():
                if not _is_vector(value):
                    continue
                if name not in states:
                    raise StateError(
                        f"{type(self.inner).__name__} has begun to keep {name!r} after its tiles were laid out: "
                        "set the option that asks for it (momentum, ...) when the optimizer is made"
                    )
                if value.data_ptr() != states[name][where].data_ptr():
                    states[name][where].copy_(value)
            if not writes_parameters(self.inner, piece.group):
                piece.group.own[piece.start : piece.stop].copy_(piece.tensor)

    def _unbind(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            piece.tensor.data = piece.tensor.data.new_empty(0)
            state = self.inner.state[piece.tensor]
            state.update({name: value.new_empty(0) for name, value in state.items() if _is_vector(value)})

    def _link(self, pieces: Sequence[Piece]) -> None:
        """Kernels write the 16-bit parameters of the tile that is there now."""
        if isinstance(self.inner, CPUOptimizer):
            for piece in pieces:
                if writes_parameters(self.inner, piece.group):
                    self.inner.copy_to(piece.tensor, piece.group.own[piece.start : piece.stop])

    def _cover(self, pieces: Sequence[Piece]) -> list[_Tile]:
        """One tile for all pieces in the same ``tile_numel`` elements of a shard."""
        tiles: dict[tuple[int, int], _Tile] = {}
        known: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        for piece in pieces:
            kind = (piece.options, piece.tensor.dtype)
            if kind not in known:
                known[kind] = states_of(self.inner, *kind)
            tile = tiles.setdefault(self._key(piece.group, piece.start), _Tile(piece.group, piece.start, piece.stop))
            tile.stop = piece.stop
            tile.states |= known[kind]
        return list(tiles.values())

    def _key(self, group: ShardedGroup, start: int) -> tuple[int, int]:
        return id(group), start // self._tile_numel


def _each(pieces: list[Piece], act: Callable[[Piece], None]) -> None:
    for piece in pieces:
        act(piece)


def _is_vector(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _is_away(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == 0
