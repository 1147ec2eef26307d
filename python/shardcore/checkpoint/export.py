"""Weights for others, as Hugging Face keeps them: safetensors files of a bounded size, and an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from shardcore._core import CheckpointWriter
from shardcore.checkpoint.dtypes import name_of
from shardcore.checkpoint.holding import BUFFER, WEIGHT, Key
from shardcore.checkpoint.stored import Read, Stored, open_checkpoint
from shardcore.errors import CheckpointError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHUNK_NUMEL = 1 << 21
"""Elements that are in memory at once."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor of the export."""

    name: str
    key: Key
    shape: list[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


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
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"to_hf(dtype={dtype!r}): expected one of {', '.join(_DTYPES)}, or None")
    stored, _ = open_checkpoint(Path(path), tag)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(file.name for file in folder.glob("model*.safetensors*"))
    if found:
        raise CheckpointError(f"{folder} holds an export already ({found[0]}, ...); give another folder")
    items = list(_items(stored, dtype, rename or str, exclude_frozen))
    shards = _split(items, max_shard_nbytes)
    names = _file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        _write(folder / name, shard, stored)
    if len(shards) > 1:
        weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
        total = {"total_size": sum(item.nbytes for item in items)}
        (folder / _INDEX).write_text(json.dumps({"metadata": total, "weight_map": weight_map}, indent=2))
    return [folder / name for name in names]


def _items(
    stored: Stored, dtype: str | None, rename: Callable[[str], str | None], exclude_frozen: bool
) -> Iterator[_Item]:
    weights, buffers = stored.training["weights"], stored.training["buffers"]
    wanted: list[tuple[str, Key, torch.dtype]] = []
    for name, info in weights.items():
        if name in stored.excluded or (exclude_frozen and not info["trainable"]):
            continue
        own = getattr(torch, info["dtype"])
        wanted += [(alias, (WEIGHT, name), own) for alias in (name, *info["aliases"])]
    for name, aliases in buffers.items():
        wanted += [(alias, (BUFFER, name), stored.dtype((BUFFER, name))) for alias in (name, *aliases)]
    for alias, key, own in wanted:
        exported = rename(alias)
        if exported is not None:
            kind = _DTYPES[dtype] if dtype is not None and own.is_floating_point else own
            yield _Item(exported, key, stored.shape(key), kind)


def _split(items: list[_Item], max_shard_nbytes: int) -> list[list[_Item]]:
    """In order, as many as fit into each file."""
    shards: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item.nbytes > max_shard_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write(path: Path, items: list[_Item], stored: Stored) -> None:
    entries = [(item.name, name_of(item.dtype, item.name), item.shape) for item in items]
    writer = CheckpointWriter(path, entries, [("format", "pt")])
    for item in items:
        numel = prod(item.shape)
        buffer = torch.empty(min(numel, _CHUNK_NUMEL), dtype=item.dtype)
        for start in range(0, numel, _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, numel)
            part = buffer[: stop - start]
            stored.read([Read(item.key, start, stop, part)])
            writer.put(part)
    writer.finish(False)
