"""Element types as safetensors spells them."""

from __future__ import annotations

import torch

from shardcore.errors import CheckpointError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype, what: str) -> str:
    """How the format spells it.

    Raises:
        CheckpointError: the format does not know it; ``what`` has it.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f"{what} has dtype {dtype}, which safetensors files cannot hold; convert it first")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a spelling."""
    return _DTYPES[name]
