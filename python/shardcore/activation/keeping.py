"""Where the inputs of recomputed regions rest from forward to backward.

An activation is cut into one part for each tensor-parallel rank, if it is partitioned (Rajbhandari et al. 2020, section
6.1), and then rests at a home: host memory, or a slot of one large buffer. What is no activation (masks, indices, what
takes no gradient) stays where it is: it is usually one tensor that all blocks share.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.activation.slots import SlotStore
from shardcore.errors import StateError
from shardcore.mesh import Axis
from shardcore.offload import PassingStore

_NUM_COMPARED = 2
"""Activations that ranks compare before they keep parts of them: the first block's input, and its output."""

_Key = tuple[Any, ...]


class Held(Protocol):
    """A tensor at its home."""

    def get(self) -> torch.Tensor:
        """The tensor, on its device."""


class Home(Protocol):
    """A place for tensors [numel]."""

    def put(self, tensor: torch.Tensor) -> Held:
        """Keep what the tensor holds now."""


class _Here:
    """A copy on the device: of a part, so that the whole can go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.clone()

    def get(self) -> torch.Tensor:
        return self._tensor


class _Device:
    def put(self, tensor: torch.Tensor) -> Held:
        return _Here(tensor)


class Kept:
    """One activation, which is the same for all regions that it was passed to."""

    def __init__(self, tensor: torch.Tensor, home: Home, axis: Axis | None) -> None:
        self._size, self._stride, self._numel = tensor.size(), tensor.stride(), tensor.numel()
        self.storage = weakref.ref(tensor.untyped_storage())
        """The memory that it was in, as long as that lives."""
        self._axis = axis
        flat = _flat(tensor)
        if axis is not None:
            part = self._part_numel(axis)
            flat = flat[axis.rank * part : (axis.rank + 1) * part]
        self._held = home.put(flat) if flat.numel() else _Here(flat)

    def take(self) -> torch.Tensor:
        """The activation with its shape and strides, as a leaf that takes a gradient. Collective if partitioned."""
        flat = self._held.get()
        if self._axis is not None:
            flat = self._gather(flat, self._axis)
        return flat.as_strided(self._size, self._stride).requires_grad_()

    def _gather(self, own: torch.Tensor, axis: Axis) -> torch.Tensor:
        part = self._part_numel(axis)
        whole = own.new_empty(part * axis.size)
        whole[axis.rank * part : axis.rank * part + own.numel()] = own
        comm.gather_shards(whole, axis, "activation").wait()
        return whole[: self._numel]

    def _part_numel(self, axis: Axis) -> int:
        return -(-self._numel // axis.size)


class Keeper:
    """Keeps the activations among the inputs of regions.

    Args:
        home: where they rest; None is the device.
        axis: the tensor-parallel ranks, each of which keeps its part; None keeps them whole.
    """

    def __init__(self, home: Home | None = None, axis: Axis | None = None) -> None:
        self.home: Home = home or _Device()
        """Where activations rest."""
        self._axis = axis
        self._known: weakref.WeakValueDictionary[_Key, Kept] = weakref.WeakValueDictionary()
        self._num_to_compare = 0 if axis is None else _NUM_COMPARED

    def keep(self, tensor: torch.Tensor) -> Kept | None:
        """The activation at its home; None for a tensor that is none. The first ones are collective if partitioned.

        Raises:
            StateError: a partitioned activation is not the same on all tensor-parallel ranks, on each of them.
            StorageError: host memory is too small.
        """
        if not _is_activation(tensor):
            return None
        storage = tensor.untyped_storage()
        key = (
            id(storage), tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, private.version(tensor),
        )  # fmt: skip
        kept = self._known.get(key)
        if kept is None or kept.storage() is not storage:
            value = tensor.detach()
            if self._axis is not None and self._num_to_compare:
                self._compare(value, self._axis)
            kept = self._known[key] = Kept(value, self.home, self._axis)
        return kept

    def _compare(self, tensor: torch.Tensor, axis: Axis) -> None:
        # Of one length, since data-parallel ranks compare what they have sent, and their activations differ.
        found = comm.exchange(f"{comm.fingerprint(tensor):08x}", axis, "partitioned activation")
        if len(set(found)) > 1:
            raise StateError(
                f"partitioned activations must be equal on all ranks of axis {axis.name!r} (ranks {list(axis.ranks)}), "
                f"but a block's input of shape {tuple(tensor.shape)} differs between them: the ranks read different "
                "data, draw different random numbers before it, or split it along the sequence already, where there is "
                "nothing to save. Leave partition out"
            )
        self._num_to_compare -= 1


def _is_activation(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes a gradient that flows on, in memory without gaps."""
    return (
        tensor.requires_grad
        and type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in a row, in whatever order of dims."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory [numel]."""
    return tensor.as_strided((tensor.numel(),), (1,))


def make_home(offload: str | None, *, contiguous: bool, num_checkpoints: int | None) -> Home | None:
    """The home that these settings name; None is the device."""
    if offload == "cpu":
        return PassingStore()
    return SlotStore(num_checkpoints) if contiguous else None
