"""Two checkpoints side by side: the largest difference of each tensor, whatever meshes they were saved on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from shardcore.checkpoint.holding import Key
from shardcore.checkpoint.stored import Read, Stored, open_checkpoint

_CHUNK_NUMEL = 1 << 21


class Difference(NamedTuple):
    """What differs about one tensor."""

    role: str
    name: str
    largest: float
    """The largest absolute difference of two elements; infinite where one is NaN, or shapes differ, or one is
    missing.
    """
    note: str
    """Why there is none, or where it is."""


def diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> list[Difference]:
    """The tensors that are not equal to the last bit, by role and name, the largest difference first. On one process;
    a few MiB are in memory at once.

    Raises:
        CheckpointError: one is damaged or incomplete.
    """
    one, other = open_checkpoint(Path(first))[0], open_checkpoint(Path(second))[0]
    return sorted(_differences(one, other), key=lambda found: (-found.largest, found.role, found.name))


def _differences(one: Stored, other: Stored) -> Iterator[Difference]:
    keys = [key for key in {**one.tensors, **other.tensors} if not key[0].startswith("rank/")]
    for key in keys:
        if key not in one.tensors or key not in other.tensors:
            yield Difference(*key, float("inf"), f"in the {'second' if key not in one.tensors else 'first'} only")
        elif one.shape(key) != other.shape(key):
            yield Difference(*key, float("inf"), f"shape {one.shape(key)} and {other.shape(key)}")
        else:
            found = _largest(one, other, key)
            if found is not None:
                yield Difference(*key, *found)


def _largest(one: Stored, other: Stored, key: Key) -> tuple[float, str] | None:
    """(largest difference, where) of two tensors of one shape; None where all bits are equal."""
    numel = prod(one.shape(key))
    largest, place = -1.0, 0
    for start in range(0, numel, _CHUNK_NUMEL):
        stop = min(start + _CHUNK_NUMEL, numel)
        parts = [torch.empty(stop - start, dtype=stored.dtype(key)) for stored in (one, other)]
        for stored, part in zip((one, other), parts, strict=True):
            stored.read([Read(key, start, stop, part)])
        if parts[0].dtype == parts[1].dtype and torch.equal(parts[0].view(torch.uint8), parts[1].view(torch.uint8)):
            continue
        apart = (parts[0].double() - parts[1].double()).abs().nan_to_num(nan=float("inf"))
        if float(apart.max()) > largest:
            largest, place = float(apart.max()), start + int(apart.argmax())
    if largest < 0:
        return None
    return largest, f"at element {place} of {numel}"
