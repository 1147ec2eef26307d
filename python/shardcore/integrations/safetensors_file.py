"""Reading safetensors files by ranges of elements: one file, or Hugging Face's several with an index.

The format: 8 bytes with the length of a JSON header (little-endian), the header ``{name: {dtype, shape,
data_offsets}}`` with offsets into what follows, the data. https://huggingface.co/docs/safetensors

Its own library gives slices along the dims of a tensor; a shard is a range of the flattened tensor, which is one range
of the file.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardcore.errors import CheckpointError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_MOST_HEADER_NBYTES = 100_000_000
"""The format's own limit."""
_INDEX = ".safetensors.index.json"
CHUNK_NBYTES = 8 << 20
"""What is read at once where values are converted or go to another device."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    file: SafetensorsFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Where its bytes start in the file."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write elements [start, stop) of the flattened tensor into ``out`` [stop - start], contiguous, any dtype and
        device. Without a copy where these are the file's and the CPU.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        itemsize = self.dtype.itemsize
        if out.dtype == self.dtype and out.device.type == "cpu":
            self.file.read_bytes(self.offset + start * itemsize, out)
            return
        num_at_once = max(CHUNK_NBYTES // itemsize, 1)
        chunk = torch.empty(min(num_at_once, stop - start), dtype=self.dtype, device="cpu")
        for position in range(start, stop, num_at_once):
            part = chunk[: stop - position]
            self.file.read_bytes(self.offset + position * itemsize, part)
            out[position - start : position - start + part.numel()].copy_(part)


class SafetensorsFile:
    """One file, opened for reading.

    Raises:
        CheckpointError: there is no such file, or it is not in the format; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self.tensors = self._read_header()
        """Its tensors by name."""

    def read_bytes(self, offset: int, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes from ``offset`` on."""
        if out.numel() == 0:
            return
        view = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        while view:
            try:
                num_read = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path} at byte {offset}: {error.strerror}") from error
            if num_read == 0:
                raise CheckpointError(f"{self.path} ends at byte {offset}, before the data that its header promises")
            view, offset = view[num_read:], offset + num_read

    def _read_header(self) -> dict[str, StoredTensor]:
        try:
            total_nbytes = os.fstat(self._descriptor).st_size
            header_nbytes = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
            text = os.pread(self._descriptor, min(header_nbytes, _MOST_HEADER_NBYTES), 8)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        if total_nbytes < 8 or header_nbytes > min(total_nbytes - 8, _MOST_HEADER_NBYTES):
            raise CheckpointError(
                f"{self.path} is not a safetensors file, or is cut off: it has {total_nbytes} bytes and promises a "
                f"header of {header_nbytes}"
            )
        try:
            header = json.loads(text)
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            base = 8 + header_nbytes
            return {name: self._entry(name, entry, base, total_nbytes) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the header of {self.path} is not one of a safetensors file: {error!r}") from error

    def _entry(self, name: str, entry: Mapping[str, Any], base: int, total_nbytes: int) -> StoredTensor:
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} of {self.path} has dtype {entry['dtype']!r}; known are {', '.join(_DTYPES)}"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
        if stop - start != prod(shape) * dtype.itemsize or start < 0 or base + stop > total_nbytes:
            raise CheckpointError(
                f"tensor {name!r} of {self.path}: bytes [{start}, {stop}) of {total_nbytes - base} cannot hold shape "
                f"{list(shape)} of {entry['dtype']}; the file is damaged or cut off"
            )
        return StoredTensor(self, name, dtype, shape, base + start)


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name; only headers are read.

    Args:
        path: a ``.safetensors`` file, an index ``*.safetensors.index.json``, or a folder that holds either.

    Raises:
        CheckpointError: a file is missing or damaged, or the index and its files disagree.
    """
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian, and this machine is not")
    found = _find(Path(path))
    if not found.name.endswith(_INDEX):
        return SafetensorsFile(found).tensors
    file_of = _read_index(found)
    files = {name: SafetensorsFile(found.parent / name) for name in sorted(set(file_of.values()))}
    absent = [name for name, file in file_of.items() if name not in files[file].tensors]
    if absent:
        raise CheckpointError(
            f"{found} lists {len(absent)} tensors that are not in their files ({', '.join(absent[:5])}, ...)"
        )
    return {name: files[file].tensors[name] for name, file in file_of.items()}


def _find(path: Path) -> Path:
    if not path.is_dir():
        return path
    indices, files = sorted(path.glob(f"*{_INDEX}")), sorted(path.glob("*.safetensors"))
    for candidates in (indices, files):
        preferred = [p for p in candidates if p.name.startswith("model.")] or candidates
        if len(preferred) == 1:
            return preferred[0]
        if preferred:
            names = ", ".join(p.name for p in preferred[:5])
            raise CheckpointError(f"folder {path} holds several checkpoints ({names}); name one of them")
    raise CheckpointError(f"folder {path} holds neither a .safetensors file nor a *{_INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_of: dict[str, str] = json.loads(path.read_text())["weight_map"]
        outside = [file for file in file_of.values() if Path(file).name != file]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error
    if outside:
        raise CheckpointError(f"{path} names {outside[0]!r}; the files of an index lie beside it")
    return file_of
