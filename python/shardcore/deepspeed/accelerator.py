"""``deepspeed.accelerator``: the device that a script asks for by ``get_accelerator()``: CUDA where there is any, else
the CPU.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from shardcore.mesh import default_device

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """Calls of ``torch.cuda`` that also have an answer on the CPU. Memory is in bytes: on CUDA that of the allocator,
    on the CPU what the process holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"`` or ``"cpu"``."""
        return self._device.type if device_index is None or not self._is_cuda else f"cuda:{device_index}"

    def current_device(self) -> int | str:
        """The index of this process's GPU, or ``"cpu"``."""
        return torch.cuda.current_device() if self._is_cuda else "cpu"

    def current_device_name(self) -> str:
        """A name that ``tensor.to`` takes."""
        return f"cuda:{torch.cuda.current_device()}" if self._is_cuda else "cpu"

    def device_count(self) -> int:
        """GPUs of this machine, or 1."""
        return torch.cuda.device_count() if self._is_cuda else 1

    def is_available(self) -> bool:
        """Always: there is a CPU."""
        return True

    def set_device(self, device_index: int) -> None:
        """Choose this process's GPU."""
        if self._is_cuda:
            torch.cuda.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for everything that was started on the device."""
        if self._is_cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Give cached device memory back."""
        if self._is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use now."""
        return torch.cuda.memory_allocated(device_index) if self._is_cuda else _resident_nbytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes that were in use."""
        return torch.cuda.max_memory_allocated(device_index) if self._is_cuda else _peak_nbytes()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Measure the peak from now on; on the CPU it stays that of the process's life."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        if self._is_cuda:
            return int(torch.cuda.get_device_properties(device_index or torch.cuda.current_device()).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return not self._is_cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that models train in here."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def communication_backend_name(self) -> str:
        """``"nccl"`` or ``"gloo"``."""
        return "nccl" if self._is_cuda else "gloo"

    def manual_seed_all(self, seed: int) -> None:
        """Seed every generator of torch."""
        torch.manual_seed(seed)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory; on the CPU as it is."""
        return tensor.pin_memory() if self._is_cuda else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device."""
        return tensor.device.type == self._device.type


def get_accelerator() -> Accelerator:
    """The device of this process: its GPU where torch sees one, else the CPU."""
    return Accelerator(default_device())


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_nbytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _peak_nbytes()
    return pages * resource.getpagesize()
