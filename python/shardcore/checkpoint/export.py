"""Weights for others, as Hugging Face keeps them: safetensors files of a bounded size, and an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from shardcore._core import CheckpointWriter
from shardcore.checkpoint.dtypes import name_of
from shardcore.checkpoint.pickled import write_pickled
from shardcore.checkpoint.weights import StoredWeight, open_weights
from shardcore.errors import CheckpointError, StorageError

Item = tuple[str, StoredWeight]
"""A tensor, and its name in the export."""


def to_hf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str | None = None,
    max_shard_nbytes: int = 5_000_000_000,
    rename: Callable[[str], str | None] | None = None,
    exclude_frozen: bool = False,
) -> list[Path]:
    """Write the weights and buffers of a checkpoint as Hugging Face files, which ``transformers`` and
    :func:`from_hf` read. On one process; whatever the size of the model, a few MiB are in memory at once.

    Args:
        path: a run's folder, or one checkpoint in it.
        out: a folder, which is made; files of an earlier export in it are refused.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for all floating tensors; None: weights as the model had them,
            which rounds the masters of 16-bit parameters. Others keep their dtype in any case.
        max_shard_nbytes: bytes of data in a file at most; a larger tensor gets a file of its own.
        rename: the exported name for a name of the model, or None to leave it out.
        exclude_frozen: leave out parameters that were not trained.

    Returns:
        The files, without the index.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or ``out`` holds an export already.
        StorageError: the disk is full or refuses.
    """
    weights = open_weights(path, tag=tag, dtype=dtype, exclude_frozen=exclude_frozen)
    renamed = [(rename(name) if rename is not None else name, weight) for name, weight in weights.items()]
    items = [(name, weight) for name, weight in renamed if name is not None]
    return _write_shards(Path(out), ("model", ".safetensors"), items, max_shard_nbytes, _write_safetensors)


def to_torch(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str | None = None,
    max_shard_nbytes: int = 5_000_000_000,
    exclude_frozen: bool = False,
) -> list[Path]:
    """As :func:`to_hf`, in the older form: ``pytorch_model*.bin``, as ``torch.save`` writes them, for programs that
    read nothing else. On one process; one tensor at a time is in memory.

    Raises:
        CheckpointError, StorageError: as :func:`to_hf`.
    """
    items = list(open_weights(path, tag=tag, dtype=dtype, exclude_frozen=exclude_frozen).items())
    return _write_shards(Path(out), ("pytorch_model", ".bin"), items, max_shard_nbytes, write_pickled)


def _write_shards(
    folder: Path,
    kind: tuple[str, str],
    items: list[Item],
    max_shard_nbytes: int,
    write: Callable[[Path, list[Item]], None],
) -> list[Path]:
    """Write the files and their index; returns the files."""
    stem, suffix = kind
    found = sorted(file.name for file in folder.glob(f"{stem}*{suffix}*"))
    if found:
        raise CheckpointError(f"{folder} holds an export already ({found[0]}, ...); give another folder")
    shards = _split(items, max_shard_nbytes)
    names = _file_names(stem, suffix, len(shards))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            write(folder / name, shard)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard}
            total = {"total_size": sum(weight.nbytes for _, weight in items)}
            index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
            (folder / f"{stem}{suffix}.index.json").write_text(index)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.errno, f"writing to {folder}: {error.strerror or error}") from error
    return [folder / name for name in names]


def _split(items: list[Item], max_shard_nbytes: int) -> list[list[Item]]:
    """In order, as many as fit into each file; a larger one has a file of its own."""
    shards: list[list[Item]] = [[]]
    filled = 0
    for name, weight in items:
        if shards[-1] and filled + weight.nbytes > max_shard_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, weight))
        filled += weight.nbytes
    return shards


def _file_names(stem: str, suffix: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)]


def _write_safetensors(path: Path, items: list[Item]) -> None:
    entries = [(name, name_of(weight.dtype, name), list(weight.shape)) for name, weight in items]
    writer = CheckpointWriter(path, entries, [("format", "pt")])
    for _, weight in items:
        for chunk in weight.chunks():
            writer.put(chunk)
    writer.finish(False)
