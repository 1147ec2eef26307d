"""Shards of parameters on a disk, of which host memory holds as many as its room allows.

Every shard is in one file. What is needed is read into a piece of host memory of fixed size; what is needed last, as
far as the order of needs is known, makes room. Reads of what is needed next, and writes of what has changed, go on
while others are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch

from shardcore import comm, plan
from shardcore.errors import StorageError
from shardcore.offload.disk import open_disk
from shardcore.offload.room import Order, Resident, find_room
from shardcore.offload.taking import take_pool

if TYPE_CHECKING:
    from shardcore._core import IoHandle
    from shardcore.mesh import Axis
    from shardcore.offload.policy import Offload


_ALIGNMENT = 512
"""Of places in host memory, as direct transfers to disks want it."""


class ShardStore:
    """Shards by number. A tensor that is given out is valid until the next call for another shard: one at a time."""

    def __init__(
        self, offload: Offload, shards: Sequence[tuple[int, torch.dtype]], device: torch.device, axis: Axis
    ) -> None:
        """Make the file and the host memory. Collective over ``axis``.

        Args:
            shards: the (numel, dtype) of each.
            device: the one that they are copied to.

        Raises:
            StorageError: the disk or host memory is too small, with the arithmetic; or the folder cannot be written.
        """
        self._shards = shards
        self._device = device
        self._places, file_nbytes = plan.place_tiles([(numel, [dtype.itemsize]) for numel, dtype in shards])
        self._capacity = offload.homes(device).room_nbytes([nbytes for _, nbytes, _ in self._places])
        pool = take_pool([("parameters on their way", self._capacity, torch.uint8)], axis, pin=offload.pin)
        self._memory = pool.tensor(self._capacity, torch.uint8)
        self.host_nbytes = pool.nbytes
        """Bytes of host memory."""
        self._engine, self._file = open_disk(offload, file_nbytes, pool)
        self._residents: dict[int, Resident] = {}
        self._order = Order()
        self._current: int | None = None
        self._num_uses = 0
        self._lock = RLock()
        self.read_nbytes = 0
        """Bytes read from the disk since the start."""
        self.written_nbytes = 0
        """Bytes written to the disk since the start."""

    def expect(self, order: Sequence[int]) -> None:
        """The shards will be needed in this order; those that come first are read while there is room."""
        with self._lock:
            self._order = Order(order)
            self._read_ahead()

    def read(self, index: int) -> torch.Tensor:
        """A shard [numel], to be read.

        Raises:
            StorageError: the disk failed; the message names the file and the place in it. The next call tries again.
        """
        with self._lock:
            return self._use(index)

    def edit(self, index: int) -> torch.Tensor:
        """A shard [numel], to be read and written; raises as :meth:`read`."""
        with self._lock:
            return self._to_write(self._use(index), index)

    def fill(self, index: int) -> torch.Tensor:
        """The memory [numel] of a shard, to be written as a whole: what it holds is undefined. Raises as :meth:`read`,
        for what makes room.
        """
        with self._lock:
            return self._to_write(self._use(index, is_read=False), index)

    def copy(self, index: int, start: int, stop: int) -> torch.Tensor:
        """A copy of elements [start, stop) of a shard. Host memory holds what it held; any thread may call it.

        Raises:
            StorageError: the disk failed.
        """
        with self._lock:
            if index in self._residents:
                self._settle(self._residents[index])
                return self._view(index)[start:stop].clone()
            dtype = self._shards[index][1]
            copy = torch.empty(stop - start, dtype=dtype)
            handle = self._engine.read(self._file, copy, self._places[index][0] + start * dtype.itemsize)
            self.read_nbytes += copy.nbytes
            handle.wait()
            return copy

    def note_device_read(self, index: int) -> None:
        """The device has been told to read the shard; its memory serves no other before that is done."""
        if self._device.type == "cuda" and index in self._residents:
            self._residents[index].reader = torch.cuda.current_stream(self._device).record_event()

    def _use(self, index: int, *, is_read: bool = True) -> torch.Tensor:
        numel, dtype = self._shards[index]
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        self._turn_to(index)
        if index not in self._residents:
            self._place(index, is_ahead=False)
            if is_read:
                self._start_read(self._residents[index])
        resident = self._residents[index]
        self._num_uses += 1
        resident.last_use = self._num_uses
        self._read_ahead()
        self._settle(resident)
        return self._view(index)

    def _to_write(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        if tensor.numel():
            _end_device_read(self._residents[index])
            self._residents[index].is_newer = True
        return tensor

    def _turn_to(self, index: int) -> None:
        """The shard that was given out before is done with: what was written there goes to the disk."""
        last = None if self._current is None else self._residents.get(self._current)
        if self._current != index and last is not None and last.is_newer:
            self._start_write(last)
        self._current = index
        self._order.advance(index)

    def _read_ahead(self) -> None:
        """Start reads of what comes next, as far as there is room that is needed later and can be had at once."""
        for place, index in self._order.upcoming():
            if index in self._residents or not self._shards[index][0]:
                continue
            if not self._place(index, is_ahead=True, before=place):
                return
            self._start_read(self._residents[index])

    def _place(self, index: int, *, is_ahead: bool, before: int = 0) -> bool:
        """Make room for a shard; ``is_ahead``: only where it costs no wait, and nothing needed before ``before``."""

        def next_use(resident: Resident) -> int | None:
            return self._order.next_use(resident.index)

        def may_leave(resident: Resident) -> bool:
            if not is_ahead:
                return True
            use = next_use(resident)
            is_later = use is None or use > before
            return is_later and resident.index != self._current and _is_idle(resident)

        nbytes = _aligned(self._places[index][1])
        by_place = sorted(self._residents.values(), key=lambda resident: resident.start)
        found = find_room(by_place, nbytes, self._capacity, may_leave=may_leave, next_use=next_use)
        if found is None:
            return False
        start, leaving = found
        for resident in leaving:
            self._evict(resident)
        self._residents[index] = Resident(index, start, start + nbytes, last_use=self._num_uses)
        return True

    def _evict(self, resident: Resident) -> None:
        if resident.is_coming:
            with suppress(StorageError):  # whoever needs it meets the error again
                resident.under_way.wait()
        else:
            self._settle(resident)
            if resident.is_newer:
                self._start_write(resident)
                self._settle(resident)
        _end_device_read(resident)
        del self._residents[resident.index]

    def _start_read(self, resident: Resident) -> None:
        offset, nbytes, _ = self._places[resident.index]
        memory = self._memory[resident.start : resident.start + nbytes]
        resident.under_way = self._engine.read(self._file, memory, offset)
        resident.is_coming = True
        self.read_nbytes += nbytes

    def _start_write(self, resident: Resident) -> None:
        offset, nbytes, _ = self._places[resident.index]
        memory = self._memory[resident.start : resident.start + nbytes]
        resident.under_way = self._engine.write(self._file, memory, offset)
        resident.is_newer = False
        self.written_nbytes += nbytes

    def _settle(self, resident: Resident) -> None:
        """Wait for what moves to or from the shard's place. After an error nothing is lost: what could not be read is
        read again when it is next needed, what could not be written stays in memory.
        """
        handle, resident.under_way = resident.under_way, None
        was_coming, resident.is_coming = resident.is_coming, False
        if handle is None:
            return
        try:
            _wait(handle)
        except StorageError:
            if was_coming:
                del self._residents[resident.index]
            else:
                resident.is_newer = True
            raise

    def _view(self, index: int) -> torch.Tensor:
        numel, dtype = self._shards[index]
        start = self._residents[index].start
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)


class StoredShard:
    """One shard of a store."""

    def __init__(self, store: ShardStore, index: int) -> None:
        self.store = store
        self.index = index

    def read(self) -> torch.Tensor:
        """As :meth:`ShardStore.read`."""
        return self.store.read(self.index)

    def edit(self) -> torch.Tensor:
        """As :meth:`ShardStore.edit`."""
        return self.store.edit(self.index)

    def fill(self) -> torch.Tensor:
        """As :meth:`ShardStore.fill`."""
        return self.store.fill(self.index)

    def copy(self, start: int, stop: int) -> torch.Tensor:
        """As :meth:`ShardStore.copy`."""
        return self.store.copy(self.index, start, stop)

    def note_device_read(self) -> None:
        """As :meth:`ShardStore.note_device_read`."""
        self.store.note_device_read(self.index)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_idle(resident: Resident) -> bool:
    """Whether its place can be had without waiting."""
    is_settled = resident.under_way is None or resident.under_way.done()
    return is_settled and not resident.is_newer and (resident.reader is None or resident.reader.query())


def _end_device_read(resident: Resident) -> None:
    reader: Any = resident.reader
    resident.reader = None
    if reader is not None:
        reader.synchronize()


def _wait(handle: IoHandle) -> None:
    """Wait for a transfer; an error of the disk ends all ranks."""
    try:
        handle.wait()
    except StorageError as error:
        comm.report_failure(error)
        raise
