"""Looking at checkpoints without loading them; no torch is needed for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shardcore._core import latest_checkpoint, list_checkpoints, verify_checkpoint
from shardcore.errors import CheckpointError


class Damage(NamedTuple):
    """Bytes of a file that are not as they were written."""

    path: Path
    start: int
    """First byte of the smallest range that is known to hold the damage."""
    stop: int
    """The byte after its last one."""
    what: str
    """What is wrong, and with which tensor."""


def verify(path: str | os.PathLike[str]) -> list[Damage]:
    """Read every byte of a checkpoint, or of all complete ones in a run's folder, and compare checksums.

    Returns:
        All damages; none for sound checkpoints. Of a run's folder, also a ``latest`` that names no complete one.

    Raises:
        CheckpointError: there is no complete checkpoint.
        StorageError: the disk failed.
    """
    place = Path(path)
    if (place / "index.json").exists() or (place / "complete").exists():
        return [Damage(*damage) for damage in verify_checkpoint(place)]
    found = [(tag, folder) for tag, folder, number, _ in list_checkpoints(place) if number is not None]
    if not found:
        raise CheckpointError(f"{place} holds no complete checkpoint")
    damages = [Damage(*damage) for _, folder in found for damage in verify_checkpoint(folder)]
    latest = latest_checkpoint(place)
    if latest is not None and latest not in [tag for tag, _ in found]:
        file = place / "latest"
        damages.append(Damage(file, 0, file.stat().st_size, f"it names {latest!r}, which is no complete checkpoint"))
    return damages
