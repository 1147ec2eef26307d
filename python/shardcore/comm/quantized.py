"""Tensors as codes of 8 or 4 bits with an fp32 scale per block, for their way between ranks.

The arithmetic is that of the Rust kernels (``shardcore_kernels::quantize``), which do it on the CPU; elsewhere torch's
operations do the same and give the same bits. A block with an inf or NaN reads back as NaN throughout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardcore import _core

BLOCK_NUMEL = _core.quantization_block()
"""Elements that share a scale."""

_SCALE_NBYTES = 4


def packed_nbytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` elements when packed: the scales, then the codes, filled up to whole fp32 numbers."""
    codes = numel if bits == 8 else (numel + 1) // 2
    return _SCALE_NBYTES * _num_blocks(numel) + -(-codes // _SCALE_NBYTES) * _SCALE_NBYTES


def pack(source: torch.Tensor, packed: torch.Tensor, bits: int, residual: torch.Tensor | None = None) -> None:
    """Quantise ``source`` (1-D; fp32, bf16 or fp16) into ``packed`` [packed_nbytes] of uint8.

    Args:
        residual: bf16, as long as ``source``: added to it first, and left holding what rounding took away.
    """
    codes, scales = _views(packed, source.numel(), bits)
    if source.device.type != "cpu":
        quantize_by_torch(source, codes, scales, bits, residual)
        return
    residuals = None if residual is None else [residual]
    threads = torch.get_num_threads()
    _core.quantize([source], [codes], [scales], bits=bits, residuals=residuals, num_threads=threads)


def unpack(packed: torch.Tensor, target: torch.Tensor, bits: int, *, add: bool = False) -> None:
    """Read ``packed`` back into ``target`` (1-D; fp32, bf16 or fp16), or add it to what that holds."""
    codes, scales = _views(packed, target.numel(), bits)
    if target.device.type != "cpu":
        dequantize_by_torch(codes, scales, target, bits, add=add)
        return
    _core.dequantize([codes], [scales], [target], bits=bits, add=add, num_threads=torch.get_num_threads())


def quantize_by_torch(
    source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int, residual: torch.Tensor | None
) -> None:
    """The kernel ``quantize`` in torch's operations, on any device."""
    numel = source.numel()
    blocks = _blocks(source.float())
    if residual is not None:
        blocks = blocks + _blocks(residual.float())
    largest = blocks.abs().amax(1, keepdim=True)
    is_finite = largest < torch.inf
    # A tensor, since dividing by a Python number may become a multiplication by its inverse, which rounds otherwise.
    largest_code = largest.new_full((1, 1), 127.0 if bits == 8 else 7.0)
    scale = torch.where(is_finite, largest / largest_code, torch.nan)
    factor = (largest_code / largest).clamp(max=torch.finfo(torch.float32).max)
    whole = torch.where(is_finite, (blocks * factor).round(), 0.0)
    scales.copy_(scale.flatten())
    if residual is not None:
        rest = torch.where(is_finite, blocks - whole * scale, 0.0)
        residual.copy_(rest.flatten()[:numel])
    integers = whole.to(torch.int8).view(torch.uint8).flatten()
    if bits == 4:
        integers = (integers[0::2] & 15) | (integers[1::2] << 4)
    codes.copy_(integers[: codes.numel()])


def dequantize_by_torch(
    codes: torch.Tensor, scales: torch.Tensor, target: torch.Tensor, bits: int, *, add: bool
) -> None:
    """The kernel ``dequantize`` in torch's operations, on any device."""
    integers = codes.view(torch.int8)
    if bits == 4:
        integers = torch.stack(((codes << 4).view(torch.int8) >> 4, integers >> 4), 1).flatten()
    values = (_blocks(integers[: target.numel()].float()) * scales[:, None]).flatten()[: target.numel()]
    target.copy_(values + target if add else values)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """[blocks, BLOCK_NUMEL], the last filled up with zeros."""
    missing = -values.numel() % BLOCK_NUMEL
    return F.pad(values, (0, missing)).view(-1, BLOCK_NUMEL)


def _views(packed: torch.Tensor, numel: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a packed tensor."""
    start = _SCALE_NBYTES * _num_blocks(numel)
    num_codes = numel if bits == 8 else (numel + 1) // 2
    return packed[start : start + num_codes], packed[:start].view(torch.float32)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL)
