"""A checkpoint that is opened for reading: its tensors by name, and any range of them into any memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from shardcore._core import CheckpointReader, choose_checkpoint
from shardcore.checkpoint.cutting import cuts
from shardcore.checkpoint.dtypes import dtype_of
from shardcore.checkpoint.holding import BUFFER, STATE, WEIGHT, Key
from shardcore.checkpoint.values import decode
from shardcore.protocols import Runs

_CHUNK_NBYTES = 8 << 20
"""What is read at once where values are converted or go to a device."""


@dataclass(frozen=True, slots=True)
class Read:
    """Elements [start, stop) of a flattened tensor, wanted in ``out`` [stop - start], any dtype and device."""

    key: Key
    start: int
    stop: int
    out: torch.Tensor
    runs: Runs | None = None
    """The elements are counted in these runs of the tensor."""


class Source(Protocol):
    """A checkpoint of any form that can be read."""

    tensors: dict[Key, dict[str, Any]]
    """Role, name, dtype and shape of each, as in an index."""
    training: dict[str, Any]
    """As in an index."""

    def shape(self, key: Key) -> list[int]:
        """The unsharded shape of a tensor."""

    def dtype(self, key: Key) -> torch.dtype:
        """The dtype in which a tensor is kept."""

    def read(self, wanted: Iterable[Read]) -> None:
        """Read all of these; converted where dtypes differ."""


class Stored:
    """One complete checkpoint.

    Raises:
        CheckpointError: it is damaged; the message names the file and its bytes.
    """

    def __init__(self, folder: Path, reader: CheckpointReader | None = None) -> None:
        self.folder = folder
        self._reader = reader or CheckpointReader(folder)
        self.index: dict[str, Any] = json.loads(self._reader.index())
        self.training: dict[str, Any] = self.index["training"] or {}
        self.tensors = {(t["role"], t["name"]): t for t in self.index["tensors"]}
        self._number = {key: i for i, key in enumerate(self.tensors)}
        self._states: dict[str, set[str]] = {}
        for role, name in self.tensors:
            if role.startswith(STATE):
                self._states.setdefault(name, set()).add(role.removeprefix(STATE))
        weights: dict[str, dict[str, Any]] = self.training.get("weights", {})
        self._name_of = {alias: name for name, info in weights.items() for alias in (name, *info["aliases"])}
        buffers: dict[str, list[str]] = self.training.get("buffers", {})
        self._buffer_of = {alias: (BUFFER, name) for name, aliases in buffers.items() for alias in (name, *aliases)}
        self.excluded = {name for name in weights if (WEIGHT, name) not in self.tensors}
        """Parameters that were left out on purpose."""

    def name_among(self, names: Iterable[str]) -> str | None:
        """Under which name it keeps the parameter that has these names in the model."""
        return next((self._name_of[name] for name in names if name in self._name_of), None)

    def learn(self, ties: Iterable[tuple[str, ...]]) -> None:
        """That these are names of one parameter each, whichever of them it has."""
        for names in ties:
            kept = self.name_among(names)
            if kept is not None:
                self._name_of.update({name: kept for name in names if name not in self._name_of})

    def buffer_among(self, names: Iterable[str]) -> Key | None:
        """Under which key it keeps the buffer that has these names in the model."""
        return next((self._buffer_of[name] for name in names if name in self._buffer_of), None)

    def names(self, role: str) -> list[str]:
        """Of all tensors of a role."""
        return [name for kind, name in self.tensors if kind == role]

    def shape(self, key: Key) -> list[int]:
        """The unsharded shape of a tensor."""
        return list(self.tensors[key]["shape"])

    def dtype(self, key: Key) -> torch.dtype:
        """The dtype in which a tensor is kept."""
        return dtype_of(self.tensors[key]["dtype"])

    def states_of(self, name: str) -> set[str]:
        """The optimizer states of a parameter that have a value for each element."""
        return self._states.get(name, set())

    def part(self, name: str) -> Any:
        """The decoded state of a part: ``"scheduler"``, ``"data"``."""
        return decode(self.training["parts"].get(name))

    @property
    def client_state(self) -> dict[str, Any]:
        """What the user had saved."""
        return decode(self.training["client_state"]) or {}

    def check_headers(self, first: int, step: int) -> None:
        """Check the headers of every ``step``-th file from the ``first`` on.

        Raises:
            CheckpointError: one is damaged.
        """
        for file in range(first, len(self.index["files"]), step):
            self._reader.check_header(file)

    def read(self, wanted: Iterable[Read]) -> None:
        """Read all of these; converted where dtypes differ.

        Raises:
            CheckpointError: a block is damaged.
            StorageError: the disk failed.
        """
        at_once = []
        for want in wanted:
            if want.out.device.type == "cpu" and want.out.dtype == self.dtype(want.key) and want.out.is_contiguous():
                at_once.append((self._number[want.key], want.start, want.stop, want.out.detach(), want.runs))
            else:
                self._convert(want)
        self._reader.read(at_once)

    def whole(self, key: Key) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        out = torch.empty(prod(self.shape(key)), dtype=self.dtype(key), device="cpu")
        self.read([Read(key, 0, out.numel(), out)])
        return out.view(self.shape(key))

    def _convert(self, want: Read) -> None:
        dtype = self.dtype(want.key)
        num_at_once = max(_CHUNK_NBYTES // dtype.itemsize, 1)
        buffer = torch.empty(min(num_at_once, want.stop - want.start), dtype=dtype, device="cpu")
        for start in range(want.start, want.stop, num_at_once):
            stop = min(start + num_at_once, want.stop)
            part = buffer[: stop - start]
            self._reader.read([(self._number[want.key], start, stop, part, want.runs)])
            want.out[start - want.start : stop - want.start].copy_(part)


def reads_of(key: Key, param: torch.Tensor, of: tuple[int, int], out: torch.Tensor) -> list[Read]:
    """What to read of a parameter's tensor for elements [start, stop) of the part of it that this rank has.

    Args:
        out: [stop - start] where they are wanted.
    """
    parts = cuts(param, *of)
    return [Read(key, part.start, part.stop, out[part.offset : part.offset + part.numel], part.runs) for part in parts]


def open_checkpoint(place: Path, tag: str | None = None) -> tuple[Stored, list[str]]:
    """The checkpoint that a run folder, a tag in it or a checkpoint's own folder means, and what is worth telling.

    Raises:
        CheckpointError: there is none that is complete, or it is damaged.
    """
    folder, notes = choose_checkpoint(place, tag)
    return Stored(Path(folder)), notes


def weight_key(name: str) -> Key:
    """The key of a parameter."""
    return WEIGHT, name
