"""The weights and buffers of a checkpoint under the names that others know, each read when it is wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from shardcore.checkpoint import deepspeed
from shardcore.checkpoint.holding import BUFFER, WEIGHT, Key
from shardcore.checkpoint.stored import Read, Source, open_checkpoint
from shardcore.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHUNK_NUMEL = 1 << 21
"""Elements that are in memory at once."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One tensor of a checkpoint. Tied weights are one tensor under several names, and have one ``key``."""

    name: str
    key: Key
    shape: torch.Size
    dtype: torch.dtype
    """In which it is read; the checkpoint may keep it in another."""
    stored: Source = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The whole tensor, in host memory.

        Raises:
            CheckpointError: bytes of it are damaged.
        """
        whole = torch.empty(self.shape.numel(), dtype=self.dtype)
        self.stored.read([Read(self.key, 0, whole.numel(), whole)])
        return whole.view(self.shape)

    def chunks(self) -> Iterator[torch.Tensor]:
        """Its elements in order, 1-D, a few MiB at a time in one buffer that the next chunk overwrites."""
        numel = self.shape.numel()
        buffer = torch.empty(min(numel, _CHUNK_NUMEL), dtype=self.dtype)
        for start in range(0, numel, _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, numel)
            self.stored.read([Read(self.key, start, stop, buffer[: stop - start])])
            yield buffer[: stop - start]


def open_weights(
    path: str | os.PathLike[str], *, tag: str | None = None, dtype: str | None = None, exclude_frozen: bool = False
) -> dict[str, StoredWeight]:
    """The weights and buffers of a checkpoint, ours or DeepSpeed's, by their names in the unsharded model, tied ones
    under each of theirs. On one process; nothing is read yet.

    Args:
        path: a run's folder, or one checkpoint in it.
        tag: which checkpoint of the folder; None: the one that ``latest`` names.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for all floating tensors; None: weights as the model had them.
            Others keep their dtype in any case.
        exclude_frozen: leave out parameters that were not trained.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}, or None")
    is_foreign = deepspeed.looks_like_deepspeed(Path(path), tag)
    source: Source = deepspeed.collect(Path(path), tag) if is_foreign else open_checkpoint(Path(path), tag)[0]
    found = {}
    for name, key, own in _named(source, exclude_frozen):
        kind = DTYPES[dtype] if dtype is not None and own.is_floating_point else own
        found[name] = StoredWeight(name, key, torch.Size(source.shape(key)), kind, source)
    return found


def _named(source: Source, exclude_frozen: bool) -> Iterator[tuple[str, Key, torch.dtype]]:
    """(name, key, dtype in the model) of each tensor, under all its names."""
    for name, info in source.training["weights"].items():
        if (WEIGHT, name) not in source.tensors or (exclude_frozen and not info["trainable"]):
            continue
        own = getattr(torch, info["dtype"])
        yield from ((alias, (WEIGHT, name), own) for alias in (name, *info["aliases"]))
    for name, aliases in source.training["buffers"].items():
        key = (BUFFER, name)
        yield from ((alias, key, source.dtype(key)) for alias in (name, *aliases))
