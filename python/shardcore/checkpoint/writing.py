"""One rank's part in a save: its share, as a file; on the first rank, the index of all files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcore._core import CheckpointWriter, checkpoint_aside, commit_checkpoint
from shardcore.checkpoint.holding import Holding, read_in_order
from shardcore.checkpoint.sharing import Share, entry_of, shapes_of
from shardcore.protocols import ShardedOptimizerMark

FORMAT, VERSION, BLOCK_NBYTES = "shardcore-checkpoint", 1, 4 << 20
VERSION_WITH_RUNS = 2
"""Of an index with pieces across the rows of tensors."""
_CHUNK_NBYTES = 8 << 20
"""What goes through host memory at once where tensors are on a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a save is done, the same on every rank."""

    keep_last: int | None = None
    keep_every: int | None = None
    is_latest: bool = True
    read_back: bool = False


@dataclass(kw_only=True, slots=True)
class Job:
    """What this rank writes."""

    run: Path
    tag: str
    options: Options
    file: str
    """Name of this rank's file."""
    holding: Holding
    plan: Share
    keepers: list[ShardedOptimizerMark]
    """Show the pieces that have no source of their own, one after the other."""
    training: dict[str, Any]
    _copies: dict[int, torch.Tensor] | None = None
    _written: list[Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's share."""
        return sum((part.stop - part.start) * self.holding.itemsize(part.piece) for part in self.plan.parts)

    def copy(self) -> None:
        """Bring this rank's share into host memory. Where states rest on a disk, it is written at once instead."""
        if self.holding.rests_on_disk:
            self._written = self._write()
            return
        copies: dict[int, torch.Tensor] = {}

        def take(number: int, values: torch.Tensor) -> None:
            copies[number] = values.detach().to("cpu", copy=True)

        self._each_part(take)
        self._copies = copies

    def write(self) -> list[Any]:
        """Write this rank's file. Returns what the index needs: the file, and of each part (role, name, start, stop,
        offset, checksums, runs).
        """
        return self._written if self._written is not None else self._write()

    def commit(self, written: list[Any]) -> str:
        """Make a checkpoint of what all ranks have written; returns its folder. On the first rank."""
        index = _build_index(self.plan, written, self.training)
        path, _ = commit_checkpoint(
            self.run,
            self.tag,
            json.dumps(index, allow_nan=False, separators=(",", ":")),
            is_latest=self.options.is_latest,
            keep_last=self.options.keep_last,
            keep_every=self.options.keep_every,
        )
        return str(path)

    def _write(self) -> list[Any]:
        parts = self.plan.parts
        path = checkpoint_aside(self.run, self.tag) / self.file
        entries = [entry_of(self.holding, part) for part in parts]
        writer = CheckpointWriter(path, entries, shapes_of(self.holding, parts))

        def put(_: int, values: torch.Tensor) -> None:
            for chunk in _on_host(values.detach()):
                writer.put(chunk)

        if self._copies is None:
            self._each_part(put)
        else:
            for number in range(len(parts)):
                put(number, self._copies.pop(number))
        nbytes, header_nbytes, header_crc32, sums = writer.finish(self.options.read_back)
        file = {"name": self.file, "nbytes": nbytes, "header_nbytes": header_nbytes, "header_crc32": header_crc32}
        held = [self.holding.pieces[part.piece] for part in parts]
        places = [
            [*piece.key, part.start, part.stop, offset, crc32, piece.runs]
            for piece, part, (offset, crc32) in zip(held, parts, sums, strict=True)
        ]
        return [file, places]

    def _each_part(self, act: Callable[[int, torch.Tensor], None]) -> None:
        """Call ``act(number of the part, its values)`` for all, in their order."""
        of_piece: dict[int, list[int]] = {}
        for number, part in enumerate(self.plan.parts):
            of_piece.setdefault(part.piece, []).append(number)

        def show(piece: int, values: torch.Tensor) -> None:
            first = self.holding.pieces[piece].start
            for number in of_piece.get(piece, ()):
                part = self.plan.parts[number]
                act(number, values[part.start - first : part.stop - first])

        read_in_order(self.holding, self.keepers, show)


def _on_host(values: torch.Tensor) -> Iterable[torch.Tensor]:
    """The values [numel] in host memory, a chunk at a time where they are elsewhere."""
    if values.device.type == "cpu":
        return [values]
    return (chunk.cpu() for chunk in values.split(max(_CHUNK_NBYTES // values.element_size(), 1)))


def _build_index(plan: Share, written: list[Any], training: dict[str, Any]) -> dict[str, Any]:
    """The index of the files that all ranks have written."""
    pieces: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in plan.tensors}
    for number, (_, places) in enumerate(written):
        for role, name, start, stop, offset, crc32, runs in places:
            piece = {"file": number, "offset": offset, "start": start, "stop": stop, "crc32": crc32}
            if runs is not None:
                piece["runs"] = dict(zip(("first", "length", "stride"), runs, strict=True))
            pieces[role, name].append(piece)
    for found in pieces.values():
        found.sort(key=_place)
    has_runs = any("runs" in piece for found in pieces.values() for piece in found)
    tensors = [
        {"role": role, "name": name, "dtype": tensor.dtype, "shape": tensor.shape, "pieces": pieces[role, name]}
        for (role, name), tensor in sorted(plan.tensors.items())
    ]
    return {
        "format": FORMAT,
        "version": VERSION_WITH_RUNS if has_runs else VERSION,
        "block_nbytes": BLOCK_NBYTES,
        "files": [file for file, _ in written],
        "tensors": tensors,
        "training": training,
    }


def _place(piece: dict[str, Any]) -> tuple[int, int]:
    return int(piece["runs"]["first"]) if "runs" in piece else 0, int(piece["start"])
