"""Engines, tensors, pools and processes for the tests of host memory and disk."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch

from shardcore.offload import HostPool, IoEngine

BACKENDS = ["io_uring", "threads"]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def data(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, uint8 [nbytes]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def engines(**options: object) -> Iterator[IoEngine]:
    """One engine of each back end; small blocks, so that small tensors are many transfers."""
    for backend in BACKENDS:
        settings = {"backend": backend, "queue_depth": 4, "block_nbytes": 4096, **options}
        with IoEngine(**settings) as engine:  # type: ignore[arg-type]
            yield engine


def python(program: str, *arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


class CountedPool(HostPool):
    """Notes what is taken from the machine."""

    taken: ClassVar[list[int]] = []

    def __init__(self, nbytes: int, pin: bool = True) -> None:
        super().__init__(nbytes, pin=pin)
        self.taken.append(nbytes)
