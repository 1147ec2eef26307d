"""Host memory whose size is known at the start: handed out exactly, never rounded up to a power of two."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from shardcore._core import HostMemory, IoEngine

_log = logging.getLogger("shardcore")


class HostPool:
    """One piece of host memory, from which tensors are taken one behind the other.

    The memory is mapped, zeroed and committed at once, so that memory that is not there is an error here and not a
    killed process later. It is given back when the pool and all its tensors are gone.

    Args:
        nbytes: Bytes of the pool; ``HostPool.required`` counts them for a list of tensors.
        pin: Register the memory with CUDA, so that copies to and from a GPU are asynchronous and fast. Without CUDA
            there is nothing to do. If CUDA refuses, a warning is logged once and the memory serves unpinned.
        huge_pages: Align to huge pages and ask the kernel for them: disks and copies are faster, and no more memory is
            taken. Where there are none, normal pages do.
        lock: Never swap the memory out; counts against ``ulimit -l``.

    Raises:
        StorageError: With the arithmetic, if the machine, a container or ``ulimit -l`` has less.
    """

    def __init__(self, nbytes: int, pin: bool = True, *, huge_pages: bool = True, lock: bool = False) -> None:
        self._memory = HostMemory(nbytes, huge_pages=huge_pages, lock=lock)
        self._pinned = pin and _pin(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes that can be taken."""
        return self._memory.nbytes

    @property
    def committed_nbytes(self) -> int:
        """Bytes taken from the machine: ``nbytes`` in whole pages."""
        return self._memory.committed_nbytes

    @property
    def taken_nbytes(self) -> int:
        """Bytes taken so far, with the gaps between tensors."""
        return self._memory.taken_nbytes

    @property
    def pinned(self) -> bool:
        """Whether CUDA has the memory registered."""
        return self._pinned

    @staticmethod
    def required(tensors: Iterable[tuple[int, torch.dtype]]) -> int:
        """Bytes of a pool from which tensors of these (numel, dtype) can be taken in this order."""
        return HostMemory.required([numel * dtype.itemsize for numel, dtype in tensors])

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next ``numel`` elements of the pool as a tensor [numel], zeroed; it starts at a multiple of 512 bytes.

        Raises ``StorageError`` with the arithmetic if fewer are left.
        """
        offset = self._memory.take(numel * dtype.itemsize)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)

    def register(self, engine: IoEngine) -> bool:
        """Let the engine's kernel queue look the memory up once instead of at each transfer, until ``engine.close``.

        Returns whether it did; transfers work all the same where it is refused.
        """
        return engine.register(self._memory)

    def __repr__(self) -> str:
        pinned = ", pinned" if self.pinned else ""
        return f"<HostPool of {self.nbytes} bytes, {self.taken_nbytes} taken{pinned}>"


def _pin(memory: HostMemory) -> bool:
    """Register the memory with CUDA until it is given back; False where there is no CUDA or it refuses."""
    if not torch.cuda.is_available() or memory.nbytes == 0:
        return False
    cudart: Any = torch.cuda.cudart()
    try:
        status = int(cudart.cudaHostRegister(memory.address, memory.committed_nbytes, 0))
    except RuntimeError as error:
        status = -1
        reason = str(error)
    else:
        reason = f"cudaHostRegister returned {status}"
    if status != 0:
        _warn_unpinned(reason)
        return False
    memory.on_release(_unpin(cudart, memory.address))
    return True


def _unpin(cudart: Any, address: int) -> Callable[[], object]:
    return lambda: cudart.cudaHostUnregister(address)


@cache
def _warn_unpinned(reason: str) -> None:
    """Say once for each reason that memory stays unpinned."""
    _log.warning("host memory cannot be pinned (%s): copies to and from the GPU will be slower", reason)
