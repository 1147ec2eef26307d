"""Files as ``torch.save`` writes them, with one tensor in memory at a time."""

from __future__ import annotations

import errno
import io
import pickle
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcore import _torch_private as private
from shardcore.checkpoint.holding import Key
from shardcore.checkpoint.weights import StoredWeight
from shardcore.errors import CheckpointError, StorageError

_PROTOCOL = 2
"""Of pickles in such files."""
_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage, torch.complex64: torch.ComplexFloatStorage,
}  # fmt: skip
"""The classes by which such files name dtypes."""


@dataclass(frozen=True, slots=True)
class _Record:
    """The elements of a tensor: a record of the file."""

    number: int
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor whose elements are a record."""

    record: _Record
    shape: torch.Size


def write_pickled(path: Path, items: Iterable[tuple[str, StoredWeight]]) -> None:
    """Write these tensors by name, as ``torch.save`` writes a dict of them; tied ones are one tensor under their names.

    Raises:
        CheckpointError: bytes of the checkpoint are damaged; or a dtype that such files do not name.
        StorageError: the disk is full or refuses.
    """
    numbers: dict[tuple[Key, torch.dtype], int] = {}
    tensors: dict[str, _Tensor] = {}
    weights: list[StoredWeight] = []
    for name, weight in items:
        if weight.dtype not in _STORAGES:
            raise CheckpointError(f"{name} has dtype {weight.dtype}, which is not written here; use safetensors files")
        number = numbers.setdefault((weight.key, weight.dtype), len(numbers))
        if number == len(weights):
            weights.append(weight)
        tensors[name] = _Tensor(_Record(number, weight.dtype, weight.shape.numel()), weight.shape)
    content = io.BytesIO()
    _Pickler(content, _PROTOCOL).dump(tensors)
    try:
        with private.open_archive(path) as put:
            put("data.pkl", content.getvalue())
            for number, weight in enumerate(weights):
                put(f"data/{number}", weight.read())
    except RuntimeError as error:  # of torch's writer: it does not say why the disk refused
        if isinstance(error, CheckpointError):
            raise
        with suppress(OSError):
            path.unlink()
        raise StorageError(errno.EIO, f"writing {path}: {error}") from error


class _Pickler(pickle.Pickler):
    """Writes of each tensor what ``torch.load`` makes it of."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Record):
            return "storage", _STORAGES[obj.dtype], str(obj.number), "cpu", obj.numel
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Tensor):
            return private.rebuilt(obj.record, obj.shape)
        return NotImplemented
