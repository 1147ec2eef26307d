"""A checkpoint again, in another number of files: what a job of so many ranks would have written."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardcore._core import CheckpointWriter, abandon_checkpoint, begin_checkpoint, commit_checkpoint
from shardcore.checkpoint.stored import Read, Stored, open_checkpoint
from shardcore.plan import share_writes

_CHUNK_NUMEL = 1 << 21


def reshard(path: str | os.PathLike[str], out: str | os.PathLike[str], num_files: int) -> Path:
    """Copy a checkpoint into ``num_files`` files of about equal size, under the same tag in the run folder ``out``.
    Any number of ranks loads it before and after; fewer or more files suit some storage better. On one process; a few
    MiB are in memory at once.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
        StorageError: the disk is full or refuses.
    """
    stored, _ = open_checkpoint(Path(path))
    run, tag = Path(out), stored.folder.name
    entries = list(stored.tensors.values())
    whole = [(i, 0, prod(entry["shape"])) for i, entry in enumerate(entries)]
    itemsizes = [stored.dtype((entry["role"], entry["name"])).itemsize for entry in entries]
    shares = share_writes([whole] * num_files, itemsizes)
    aside = Path(begin_checkpoint(run, tag))
    try:
        files = []
        for entry in entries:
            entry["pieces"] = []
        for number, share in enumerate(shares):
            files.append(_write(aside, number, share, entries, stored))
        for entry in entries:
            entry["pieces"].sort(key=lambda piece: piece["start"])
        index = json.dumps({**stored.index, "files": files, "tensors": entries}, separators=(",", ":"))
        folder, _ = commit_checkpoint(run, tag, index, is_latest=True)
    except BaseException:
        abandon_checkpoint(run, tag)
        raise
    return Path(folder)


def _write(
    aside: Path, number: int, share: list[tuple[int, int, int]], entries: list[dict[str, Any]], stored: Stored
) -> dict[str, Any]:
    """One file; enters its pieces in ``entries``."""
    name = f"rank-{number:05d}.safetensors"
    headers = []
    for tensor, start, stop in share:
        entry = entries[tensor]
        label = entry["name"] if entry["role"] == "weight" else f"{entry['role']}/{entry['name']}"
        headers.append((f"{label}[{start}:{stop}]", entry["dtype"], [stop - start]))
    writer = CheckpointWriter(aside / name, headers, [])
    for tensor, start, stop in share:
        key = (entries[tensor]["role"], entries[tensor]["name"])
        for first in range(start, stop, _CHUNK_NUMEL):
            last = min(first + _CHUNK_NUMEL, stop)
            part = torch.empty(last - first, dtype=stored.dtype(key))
            stored.read([Read(key, first, last, part)])
            writer.put(part)
    nbytes, header_nbytes, header_crc32, sums = writer.finish(False)
    for (tensor, start, stop), (offset, crc32) in zip(share, sums, strict=True):
        piece = {"file": number, "offset": offset, "start": start, "stop": stop, "crc32": crc32}
        entries[tensor]["pieces"].append(piece)
    return {"name": name, "nbytes": nbytes, "header_nbytes": header_nbytes, "header_crc32": header_crc32}
