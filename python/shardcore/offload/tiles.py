"""Optimizer states on a disk: tiles in one file, of which host memory holds a few at a time. What moves when is planned
by the Rust core (``plan.plan_swap``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardcore import plan
from shardcore._core import IoHandle
from shardcore.errors import StateError, StorageError
from shardcore.offload.disk import open_disk
from shardcore.offload.policy import Offload
from shardcore.offload.taking import take_pool

if TYPE_CHECKING:
    from shardcore.mesh import Axis

Parts = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class TileSpec:
    """A range of a shard: how many elements, and the dtype of each of its parts."""

    numel: int
    parts: tuple[torch.dtype, ...]


class TileStore:
    """Tiles on a disk, updated one after the other in host memory."""

    def __init__(self, offload: Offload, tiles: Sequence[TileSpec], axis: Axis) -> None:
        """Make the file and the host memory. Collective over ``axis``.

        Raises:
            StorageError: the disk or host memory is too small, with the arithmetic; or the folder cannot be written.
        """
        self._tiles = tiles
        sizes = [(tile.numel, [dtype.itemsize for dtype in tile.parts]) for tile in tiles]
        self._places, self.file_nbytes = plan.place_tiles(sizes)
        slot_nbytes = max((nbytes for _, nbytes, _ in self._places), default=0)
        num_slots = min(offload.num_tiles, len(tiles))
        pool = take_pool([("tiles of states", slot_nbytes, torch.uint8)] * num_slots, axis, pin=offload.pin)
        self.host_nbytes = pool.nbytes
        """Bytes of host memory."""
        self._slots = [pool.tensor(slot_nbytes, torch.uint8) for _ in range(num_slots)]
        self._engine, self._file = open_disk(offload, self.file_nbytes, pool)
        self._under_way: list[tuple[str, IoHandle] | None] = [None] * num_slots
        self._residents: list[int | None] = [None] * num_slots
        self._on_disk: set[int] = set()
        self._newer: set[int] = set()
        """Tiles in host memory that changed since they were on the disk."""
        self.failed = False
        """A step failed half-way, so that some tiles are newer than others."""
        self.read_nbytes = 0
        """Bytes read from the disk since the start."""
        self.written_nbytes = 0
        """Bytes written to the disk since the start."""

    def run(self, order: Sequence[int], act: Callable[[int, Parts], bool], *, is_step: bool) -> None:
        """Call ``act(tile, parts)`` for each tile of ``order`` with its parts in host memory, each [numel].

        Args:
            act: returns whether it changed the tile, which is kept then. A tile that was never changed has undefined
                parts.
            is_step: the tiles belong together: a failure half-way makes all of them useless. Else each is right by
                itself, and a failure loses nothing.

        Raises:
            StorageError: the disk failed; the message names the file.
            StateError: it failed before in a step, so that some tiles are newer than others.
        """
        if self.failed:
            raise StateError(
                "an earlier step failed between host memory and disk, so optimizer states are partly updated: load a "
                "checkpoint (load_state_dict), or start again"
            )
        self.failed = is_step
        for what, tile, slot in plan.plan_swap(list(order), self._residents)[0]:
            self._settle(slot)
            if what == "update":
                self._show(tile, slot, act)
            elif what == "write":
                self._start_write(tile, slot)
            else:
                self._start_read(tile, slot)
        self.failed = False

    def forget(self) -> None:
        """All tiles are as if never updated, also after a failure."""
        for slot in range(len(self._slots)):
            with suppress(StorageError):
                self._settle(slot)
        self._residents = [None] * len(self._slots)
        self._on_disk.clear()
        self._newer.clear()
        self.failed = False

    def _show(self, tile: int, slot: int, act: Callable[[int, Parts], bool]) -> None:
        was_newer = tile in self._newer
        self._newer.add(tile)  # also if what follows raises
        if not act(tile, self._parts(tile, slot)) and not was_newer:
            self._newer.discard(tile)

    def _start_write(self, tile: int, slot: int) -> None:
        if tile not in self._newer:
            return
        offset, nbytes, _ = self._places[tile]
        self._under_way[slot] = "write", self._engine.write(self._file, self._slots[slot][:nbytes], offset)
        self._newer.discard(tile)
        self._on_disk.add(tile)
        self.written_nbytes += nbytes

    def _start_read(self, tile: int, slot: int) -> None:
        self._residents[slot] = tile
        if tile not in self._on_disk:
            return
        offset, nbytes, _ = self._places[tile]
        self._under_way[slot] = "read", self._engine.read(self._file, self._slots[slot][:nbytes], offset)
        self.read_nbytes += nbytes

    def _settle(self, slot: int) -> None:
        """Wait for what moves to or from the slot. After an error nothing is lost: what could not be read is read again
        when it is next needed, what could not be written stays in memory.
        """
        transfer, self._under_way[slot] = self._under_way[slot], None
        if transfer is None:
            return
        what, handle = transfer
        try:
            handle.wait()
        except StorageError:
            tile = self._residents[slot]
            if what == "read":
                self._residents[slot] = None
            elif tile is not None:
                self._newer.add(tile)
            raise

    def _parts(self, tile: int, slot: int) -> Parts:
        spec, (_, _, starts) = self._tiles[tile], self._places[tile]
        memory = self._slots[slot]
        return [
            memory[start : start + spec.numel * dtype.itemsize].view(dtype)
            for start, dtype in zip(starts, spec.parts, strict=True)
        ]
