"""Tensors that rest in host memory for a while and come back in the opposite order: activations between forward and
backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.offload.host_pool import HostPool
from shardcore.offload.lanes import Lane, Ticket, make_lane

_NUM_LEAVING = 2
"""Copies to the host that may be under way, whose tensors are still on the device."""


class _Buffers:
    """Pieces of host memory, used again for tensors of the same size."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A tensor [nbytes] of bytes; raises ``StorageError`` if the machine has less."""
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        buffer = HostPool(nbytes, self._pin).tensor(nbytes, torch.uint8)
        self.nbytes += nbytes
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.numel()].append(buffer)

    def forget_free(self) -> None:
        self.nbytes -= sum(nbytes * len(buffers) for nbytes, buffers in self._free.items())
        self._free.clear()


class PassingStore:
    """Host memory for tensors on their way from forward to backward.

    A tensor leaves by a copy that runs beside the computation, and its device memory is free two tensors later. When
    one is brought back, the one that left before it is fetched as well, since backward will want it next. Nothing waits
    for the device on the host; sizes that come again in each step use the same memory.

    Args:
        pin: register the memory with CUDA, where there is CUDA.
        lane_of: makes the lane of a device.
    """

    def __init__(self, *, pin: bool = True, lane_of: Callable[[torch.device], Lane] = make_lane) -> None:
        self._buffers = _Buffers(pin=pin)
        self._lane_of = lane_of
        self._lanes: dict[torch.device, Lane] = {}
        self._leaving: deque[weakref.ref[Passing]] = deque()
        self._last: weakref.ref[Passing] | None = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory taken so far, in use or free."""
        return self._buffers.nbytes

    def put(self, tensor: torch.Tensor) -> Passing:
        """Send a contiguous tensor away; nobody may write to it while its copy is under way (``Passing.get`` raises
        then).

        Raises:
            StorageError: the machine has not enough host memory.
        """
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = self._lane_of(tensor.device)
        passing = Passing(tensor, self._lanes[tensor.device], self._buffers, self._last)
        self._last = weakref.ref(passing)
        self._leaving.append(self._last)
        if len(self._leaving) > _NUM_LEAVING:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.leave()
        return passing

    def release(self) -> None:
        """Give host memory back that holds nothing now."""
        self._buffers.forget_free()


class Passing:
    """One tensor that is away, or on its way."""

    def __init__(
        self, tensor: torch.Tensor, lane: Lane, buffers: _Buffers, before: weakref.ref[Passing] | None
    ) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._lane = lane
        self._buffers = buffers
        self._buffer = buffers.take(tensor.nbytes)
        self._before = before
        self._source: torch.Tensor | None = tensor
        self._version = private.version(tensor)
        self._was_written_to = False
        self._ticket: Ticket = lane.start(self._host(), tensor)
        self._coming: tuple[torch.Tensor, Ticket] | None = None

    def get(self) -> torch.Tensor:
        """The tensor on its device; as often as wanted.

        Raises:
            StateError: it was written to while it was on its way to the host.
        """
        self._check()
        tensor = self._source
        if tensor is None:
            tensor, ticket = self._coming or self._start_fetching()
            self._coming = None
            ticket.wait()
        before = None if self._before is None else self._before()
        if before is not None and before._source is None and before._coming is None:
            before._coming = before._start_fetching()
        return tensor

    def leave(self) -> None:
        """Let go of the memory on the device: from here on the computation comes after the copy."""
        source, self._source = self._source, None
        if source is not None:
            self._ticket.wait()
            self._was_written_to = private.version(source) != self._version

    def _start_fetching(self) -> tuple[torch.Tensor, Ticket]:
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return tensor, self._lane.start(tensor, self._host())

    def _check(self) -> None:
        if self._source is not None:
            self._was_written_to = private.version(self._source) != self._version
        if self._was_written_to:
            raise StateError(
                f"a tensor of shape {tuple(self._shape)} was modified by an in-place operation while it was copied to "
                "host memory, and backward needs what it held before: replace the in-place operation (x += y by "
                "x = x + y), or leave offload out"
            )

    def _host(self) -> torch.Tensor:
        return self._buffer.view(self._dtype).view(self._shape)

    def __del__(self) -> None:
        if "_coming" not in self.__dict__:
            return  # it was not made to the end
        self.leave()
        if self._coming is not None:
            self._coming[1].wait()  # its memory must not serve others before the copy is over
        self._buffers.give_back(self._buffer)
