"""Copies between a device and host memory beside the computation: the one place that knows how a device does it.

A lane makes its copies in the order in which they were started, each after what the computation had queued by then. The
computation goes on meanwhile; it is held up by a ticket's ``wait`` alone, and on CUDA not even that holds up the host.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ticket(Protocol):
    """One copy under way."""

    def wait(self) -> None:
        """What the computation does from here on comes after the copy."""


class Lane(Protocol):
    """Copies of one device."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Copy ``source`` to ``target``, of the same shape and dtype; both are kept alive until somebody has waited."""


class _Done:
    def wait(self) -> None:
        pass


class CpuLane:
    """Where host memory is the device's own, a copy is made at once."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Copy."""
        target.copy_(source)
        return _Done()


class _Event:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLane:
    """A stream of its own, which waits for the computation's and is waited for by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Queue a copy behind what the current stream has queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return _Event(self._stream.record_event(), self._device)


def make_lane(device: torch.device) -> Lane:
    """A lane of the device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
