"""A checkpoint again, out of one of another form: in another number of files, or of other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardcore._core import CheckpointWriter, abandon_checkpoint, begin_checkpoint, commit_checkpoint
from shardcore.checkpoint import deepspeed
from shardcore.checkpoint.report import Report
from shardcore.checkpoint.stored import Read, Source, open_checkpoint
from shardcore.checkpoint.writing import BLOCK_NBYTES, FORMAT, VERSION
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
    return write_checkpoint(stored, Path(out), stored.folder.name, num_files)


def import_deepspeed(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    rename: Callable[[str], str | None] | None = None,
    num_files: int = 1,
) -> Report:
    """Make a checkpoint out of one of DeepSpeed's: of stages 1 to 3, of a pipeline, or universal. Weights (masters,
    where parameters are 16-bit), buffers, optimizer states and options, counters, loss scale, schedule and client
    state are taken over; :func:`load` then loads it on any mesh. On one process, without DeepSpeed; nothing that the
    files name is run, and a few MiB are in memory at once.

    Args:
        path: a run's folder, or one checkpoint in it.
        out: the folder of a run, which is made; the checkpoint gets the tag that it had.
        tag: which checkpoint of the folder; None: the one that ``latest`` (or ``latest_universal``) names.
        rename: the model's name for a name of the files (such as ``lambda name: name.removeprefix("module.")``), or
            None for what is to be left out.
        num_files: files of about equal size to write.

    Returns:
        The new checkpoint's folder in ``path``, and what was not taken over in ``notes``.

    Raises:
        CheckpointError: there is none, its files are damaged or missing, or it is of a kind that is not read
            (tensor-parallel, or with experts).
        StorageError: the disk is full or refuses.
    """
    found = deepspeed.collect(Path(path), tag, rename)
    folder = write_checkpoint(found, Path(out), Path(found.what).name, num_files)
    return Report(path=folder, world=int(found.training["world"]), notes=found.notes)


def write_checkpoint(source: Source, run: Path, tag: str, num_files: int) -> Path:
    """Copy everything of the source."""
    entries = [{**entry, "pieces": []} for entry in source.tensors.values()]
    whole = [(i, 0, prod(entry["shape"])) for i, entry in enumerate(entries)]
    itemsizes = [source.dtype((entry["role"], entry["name"])).itemsize for entry in entries]
    shares = share_writes([whole] * num_files, itemsizes)
    aside = Path(begin_checkpoint(run, tag))
    try:
        files = [_write(aside, number, share, entries, source) for number, share in enumerate(shares)]
        for entry in entries:
            entry["pieces"].sort(key=lambda piece: piece["start"])
        entries.sort(key=lambda entry: (entry["role"], entry["name"]))
        index = {
            "format": FORMAT,
            "version": VERSION,
            "block_nbytes": BLOCK_NBYTES,
            "files": files,
            "tensors": entries,
            "training": source.training,
        }
        folder, _ = commit_checkpoint(
            run, tag, json.dumps(index, allow_nan=False, separators=(",", ":")), is_latest=True
        )
    except BaseException:
        abandon_checkpoint(run, tag)
        raise
    return Path(folder)


def _write(
    aside: Path, number: int, share: list[tuple[int, int, int]], entries: list[dict[str, Any]], source: Source
) -> dict[str, Any]:
    """One file; enters its pieces in ``entries``."""
    name = f"rank-{number:05d}.safetensors"
    headers = []
    for tensor, start, stop in share:
        entry = entries[tensor]
        label = entry["name"] if entry["role"] == "weight" else f"{entry['role']}/{entry['name']}"
        is_whole = stop - start == prod(entry["shape"])
        headers.append(
            (label, entry["dtype"], entry["shape"])
            if is_whole
            else (f"{label}[{start}:{stop}]", entry["dtype"], [stop - start])
        )
    writer = CheckpointWriter(aside / name, headers, [])
    for tensor, start, stop in share:
        key = (entries[tensor]["role"], entries[tensor]["name"])
        for first in range(start, stop, _CHUNK_NUMEL):
            last = min(first + _CHUNK_NUMEL, stop)
            part = torch.empty(last - first, dtype=source.dtype(key))
            source.read([Read(key, first, last, part)])
            writer.put(part)
    nbytes, header_nbytes, header_crc32, sums = writer.finish(False)
    for (tensor, start, stop), (offset, crc32) in zip(share, sums, strict=True):
        piece = {"file": number, "offset": offset, "start": start, "stop": stop, "crc32": crc32}
        entries[tensor]["pieces"].append(piece)
    return {"name": name, "nbytes": nbytes, "header_nbytes": header_nbytes, "header_crc32": header_crc32}
