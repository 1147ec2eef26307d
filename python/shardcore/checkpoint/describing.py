"""What a checkpoint holds, as text; no torch is needed for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardcore._core import CheckpointReader, choose_checkpoint, latest_checkpoint, list_checkpoints


def explain_run(run: str | os.PathLike[str]) -> str:
    """The checkpoints of a run's folder, one line each, the oldest first; incomplete ones with the reason.

    Raises:
        StorageError: the folder cannot be read.
    """
    latest = latest_checkpoint(Path(run))
    lines = []
    for tag, folder, number, problem in list_checkpoints(Path(run)):
        if number is None:
            lines.append(f"{tag}: incomplete ({problem})")
        else:
            nbytes = sum(file.stat().st_size for file in folder.iterdir())
            lines.append(f"{tag}: number {number}, {amount(nbytes)}{', latest' if tag == latest else ''}")
    return "\n".join(lines) or f"{run} holds no checkpoint"


def explain_checkpoint(path: str | os.PathLike[str], *, with_tensors: bool = False) -> str:
    """Model, mesh, counters and sizes of one checkpoint.

    Raises:
        CheckpointError: it is incomplete, or its index is damaged.
    """
    folder, notes = choose_checkpoint(Path(path))
    index = json.loads(CheckpointReader(folder).index())
    training, tensors = index["training"], index["tensors"]
    mesh = ", ".join(f"{axis}={count}" for axis, count in training["mesh"].items() if count > 1) or "one rank"
    lines = [*notes, f"{folder}: number {index['sequence']} of its run"]
    lines.append(f"model: {training['model']}, stage {training['stage']} on {training['world']} ranks ({mesh})")
    lines += _optimizer_lines(training["optimizer"])
    lines.append(f"parts: {', '.join(training['parts']) or 'none'}")
    for role in dict.fromkeys(_kind(tensor) for tensor in tensors):
        mine = [tensor for tensor in tensors if _kind(tensor) == role]
        lines.append(f"{role}: {len(mine)} tensors, {amount(_nbytes(mine))}")
    sizes = [file["nbytes"] for file in index["files"]]
    lines.append(f"files: {len(sizes)}, {amount(sum(sizes))}, the largest {amount(max(sizes, default=0))}")
    if with_tensors:
        lines += [f"  {t['role']} {t['name']} {t['dtype']} {t['shape']} in {len(t['pieces'])} pieces" for t in tensors]
    return "\n".join(lines)


def amount(nbytes: int) -> str:
    """Bytes as people read them."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def _optimizer_lines(optimizer: dict[str, Any] | None) -> list[str]:
    if optimizer is None:
        return ["optimizer: none"]
    rates = ", ".join(f"{group['options'].get('lr')}" for group in optimizer["groups"])
    skipped = optimizer["num_skipped_steps"]
    return [f"optimizer: {optimizer['class']}, {optimizer['num_steps']} steps ({skipped} skipped), lr {rates}"]


def _kind(tensor: dict[str, Any]) -> str:
    return "of single ranks" if tensor["role"].startswith("rank/") else str(tensor["role"])


def _nbytes(tensors: Iterable[dict[str, Any]]) -> int:
    return sum(_itemsize(t["dtype"]) * sum(p["stop"] - p["start"] for p in t["pieces"]) for t in tensors)


def _itemsize(dtype: str) -> int:
    digits = "".join(char for char in dtype.split("_")[0] if char.isdigit())
    return max(int(digits or 8) // 8, 1)
