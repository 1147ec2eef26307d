"""Reading safetensors files by ranges of elements: one file, or Hugging Face's several with an index.

The format: 8 bytes with the length of a JSON header (little-endian), the header ``{name: {dtype, shape,
data_offsets}}`` with offsets into what follows, the data, of which every byte belongs to one tensor.
https://huggingface.co/docs/safetensors

Its own library gives slices along the dims of a tensor; a shard is a range of the flattened tensor, which is one range
of the file.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from reprlib import repr as shown
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
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_FIELDS = ("dtype", "shape", "data_offsets")
_METADATA = "__metadata__"
_DAMAGED = "The file is damaged or cut off: fetch it, or write it, again"
_MOST_COUNT = 2**64 - 1
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

    @property
    def nbytes(self) -> int:
        """Of all its elements."""
        return prod(self.shape) * self.dtype.itemsize

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
            header = _parse(text)
            base = 8 + header_nbytes
            found = {name: self._entry(name, entry, base) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the header of {self.path} is not one of a safetensors file: {type(error).__name__}: {error}"
            ) from error
        self._check_cover(found, base, total_nbytes)
        return found

    def _entry(self, name: str, entry: Any, base: int) -> StoredTensor:
        _check_once(entry, _FIELDS, f"tensor {name!r}")
        kind, sizes, offsets = (entry[field] for field in _FIELDS)
        if kind not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} of {self.path} has dtype {shown(kind)}; known are {', '.join(_DTYPES)}"
            )
        if not _are_counts(sizes) or max(accumulate(sizes, mul), default=1) > _MOST_COUNT:
            raise CheckpointError(
                f"tensor {name!r} of {self.path} has shape {shown(sizes)}; expected a list of integers >= 0 whose "
                f"product fits in 64 bits. {_DAMAGED}"
            )
        if not _are_counts(offsets) or len(offsets) != 2:
            raise CheckpointError(
                f"tensor {name!r} of {self.path} has data_offsets {shown(offsets)}; expected two integers >= 0. "
                f"{_DAMAGED}"
            )
        dtype, shape, (start, stop) = _DTYPES[kind], tuple(sizes), offsets
        if stop - start != prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"tensor {name!r} of {self.path}: bytes [{start}, {stop}) cannot hold shape {list(shape)} of {kind}. "
                f"{_DAMAGED}"
            )
        return StoredTensor(self, name, dtype, shape, base + start)

    def _check_cover(self, found: Mapping[str, StoredTensor], base: int, total_nbytes: int) -> None:
        """The format wants every byte of the data to belong to exactly one tensor."""
        end, last = base, "the start of the data"
        for tensor in sorted(found.values(), key=lambda t: (t.offset, t.nbytes)):
            gap, this = tensor.offset - end, f"tensor {tensor.name!r}"
            if gap < 0:
                raise CheckpointError(f"{self.path}: {last} and {this} overlap. {_DAMAGED}")
            if gap > 0:
                raise CheckpointError(f"{self.path}: {gap} bytes between {last} and {this} are no tensor's. {_DAMAGED}")
            end, last = tensor.offset + tensor.nbytes, this
        if end != total_nbytes:
            raise CheckpointError(
                f"{self.path} has {total_nbytes - base} bytes of data; the tensors of its header take {end - base}. "
                f"{_DAMAGED}"
            )


class _Object(dict[str, Any]):
    """An object of JSON, which knows the names that it was given more than once; the last of these count."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice: set[str] = set()
        if len(self) < len(pairs):
            self.twice = {name for name, times in Counter(name for name, _ in pairs).items() if times > 1}


def _parse(text: bytes) -> _Object:
    """The entries of the tensors, and nothing but what JSON and the format allow."""
    header: _Object = json.loads(text.decode("utf-8"), object_pairs_hook=_Object, parse_constant=_refuse_constant)
    _check_once(header, (_METADATA,), "the header")
    metadata = header.pop(_METADATA, None)
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"{_METADATA} is {shown(metadata)}; expected an object of strings")
    for name, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise ValueError(f"{_METADATA} has {shown(value)} for {name!r}; expected a string")
    for name in [*header, *(metadata or {}), *(metadata or {}).values()]:
        name.encode()  # half a surrogate pair is no text
    return header


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _check_once(value: Any, names: Collection[str], what: str) -> None:
    if not isinstance(value, _Object):
        raise ValueError(f"{what} is {shown(value)}; expected an object")
    twice = sorted(value.twice.intersection(names))
    if twice:
        raise ValueError(f"{what} has {twice[0]} more than once")


def _are_counts(values: Any) -> bool:
    """Whether this is a list of unsigned 64-bit integers; True and 3.0 are none."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MOST_COUNT for value in values)


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error
    if outside:
        raise CheckpointError(f"{path} names {outside[0]!r}; the files of an index lie beside it")
    return file_of
