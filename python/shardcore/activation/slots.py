"""One buffer for many activations of one size, so that freeing them leaves no gaps between what lives longer."""

from __future__ import annotations

from collections import defaultdict

import torch

_DEFAULT_NUM_SLOTS = 8

_Kind = tuple[int, torch.dtype, torch.device]


class SlotStore:
    """Slots on the device, used again in each step. Another buffer of as many is added where they are all taken.

    Args:
        num_slots: activations of one size that a buffer has room for.
    """

    def __init__(self, num_slots: int | None = None) -> None:
        self._num_slots = num_slots or _DEFAULT_NUM_SLOTS
        self._free: defaultdict[_Kind, list[torch.Tensor]] = defaultdict(list)
        self.nbytes = 0
        """Bytes of all buffers."""

    def put(self, tensor: torch.Tensor) -> Slot:
        """Copy a tensor [numel] into the first free slot."""
        free = self._free[tensor.numel(), tensor.dtype, tensor.device]
        if not free:
            rows = tensor.new_empty(self._num_slots, tensor.numel())
            self.nbytes += rows.nbytes
            free.extend(reversed(rows.unbind(0)))
        row = free.pop()
        row.copy_(tensor)
        return Slot(row, free)


class Slot:
    """A taken slot; free again when the last reference to it goes."""

    def __init__(self, row: torch.Tensor, free: list[torch.Tensor]) -> None:
        self._row = row
        self._free = free

    def get(self) -> torch.Tensor:
        """A copy [numel]: what is computed from it may outlive the slot, as in a split backward."""
        return self._row.clone()

    def __del__(self) -> None:
        self._free.append(self._row)
