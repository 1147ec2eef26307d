"""Whole fp32 weights out of a checkpoint, under DeepSpeed's names; on one process, without a process group.

As a program: ``python -m shardcore.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR``.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore import checkpoint
from shardcore.errors import CheckpointError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

_NAMES = {
    "fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
}  # fmt: skip
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class LazyTensor:
    """A tensor of a checkpoint that is read by :meth:`contiguous`."""

    def __init__(self, weight: checkpoint.StoredWeight) -> None:
        self._weight = weight
        self.shape = weight.shape
        self.dtype = weight.dtype

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """Read it into host memory.

        Raises:
            CheckpointError: bytes of it are damaged.
        """
        return self._weight.read()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Weights and floating buffers in fp32, other buffers as they are, for ``model.load_state_dict``. Of 16-bit
    parameters these are the masters, unrounded. Tied weights are one tensor under all their names.

    Args:
        checkpoint_dir: a run's folder, or one checkpoint in it.
        tag: which checkpoint of the folder; None: the one that ``latest`` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: give objects with ``shape``, ``dtype`` and ``contiguous()``, which reads the tensor, so that one at
            a time is in memory.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
    """
    found = checkpoint.open_weights(checkpoint_dir, tag=tag, dtype="fp32", exclude_frozen=exclude_frozen_parameters)
    if lazy_mode:
        return {name: LazyTensor(weight) for name, weight in found.items()}
    read: dict[Any, torch.Tensor] = {}
    for weight in found.values():
        if weight.key not in read:
            read[weight.key] = weight.read()
    return {name: read[weight.key] for name, weight in found.items()}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as Hugging Face names them: ``pytorch_model*.bin``, or with ``safe_serialization``
    ``model*.safetensors``, and an index where there are several files.

    Args:
        dtype: of floating tensors: fp32, fp16 or bf16.
        max_shard_size: bytes of a file at most, such as ``"5GB"`` or a number; None: one file.

    Raises:
        CheckpointError: as :func:`get_fp32_state_dict_from_zero_checkpoint`; or an unknown dtype or size; or
            ``output_dir`` holds such files already.
        StorageError: the disk is full or refuses.
    """
    export = checkpoint.to_hf if safe_serialization else checkpoint.to_torch
    export(
        checkpoint_dir,
        output_dir,
        tag=tag,
        dtype=_name_of(dtype),
        max_shard_nbytes=_nbytes_of(max_shard_size),
        exclude_frozen=exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """As :func:`convert_zero_checkpoint_to_state_dict`, in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move a whole model to the CPU and load the weights into it. Returns the model. One that is sharded is loaded by
    ``engine.load_checkpoint``.

    Raises:
        CheckpointError: as :func:`get_fp32_state_dict_from_zero_checkpoint`.
        RuntimeError: a tensor has another shape in the model.
    """
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state_dict, strict=False)
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint_dir", type=Path, help="a run's folder, or one checkpoint in it")
    parser.add_argument("output_dir", type=Path, help="where the files go")
    parser.add_argument("--max_shard_size", default="5GB", help="size of a file at most, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors files, which hold no code")
    parser.add_argument("-t", "--tag", help="which checkpoint of the folder; else the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        options.checkpoint_dir,
        options.output_dir,
        options.max_shard_size,
        options.safe_serialization,
        options.tag,
        options.exclude_frozen_parameters,
    )
    return 0


def _name_of(dtype: torch.dtype | str) -> str:
    found = _NAMES.get(str(dtype).removeprefix("torch.").lower())
    if found is None:
        raise CheckpointError(f"dtype={dtype!r}: expected one of {', '.join(_NAMES)}")
    return found


def _nbytes_of(amount: str | int | None) -> int:
    """Bytes of ``5GB`` and the like."""
    if amount is None:
        return 1 << 62
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?I?B)?\s*", str(amount).upper())
    if match is None or not int(match[1]):
        raise CheckpointError(f"max_shard_size={amount!r}: expected a number of bytes or a text such as '5GB'")
    return int(match[1]) * _UNITS[match[2] or "B"]


if __name__ == "__main__":
    raise SystemExit(main())
