"""What the files of others hold, under the names of the whole model: for each tensor, its parts in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from shardcore.checkpoint.dtypes import name_of
from shardcore.checkpoint.holding import Key
from shardcore.checkpoint.stored import Read
from shardcore.errors import CheckpointError


@dataclass(slots=True)
class Collected:
    """One checkpoint; its tensors stay in their files until they are read."""

    what: str
    """How messages name it."""
    tensors: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """As in an index: role, name, dtype and shape of each."""
    training: dict[str, Any] = field(default_factory=lambda: {"weights": {}, "buffers": {}})
    """As in an index."""
    notes: list[str] = field(default_factory=list)
    """What is not taken over."""
    _parts: dict[Key, list[torch.Tensor]] = field(default_factory=dict)

    _lazy: dict[Key, tuple[torch.dtype, Callable[[], torch.Tensor]]] = field(default_factory=dict)
    _last: tuple[Key, torch.Tensor] | None = None
    """Of the lazy ones, which are read as a whole, the one that was read last."""

    def add(self, key: Key, shape: Iterable[int], parts: list[torch.Tensor]) -> None:
        """Enter a tensor that is these parts, flattened and one behind the other; what is over at the end is padding.

        Raises:
            CheckpointError: they have fewer elements than the shape.
        """
        extents = list(shape)
        found, numel = sum(part.numel() for part in parts), prod(extents)
        if not parts or found < numel:
            raise CheckpointError(
                f"{self.what}: of {' '.join(key)} with shape {extents} there are {found} of {numel} elements"
            )
        dtype = name_of(parts[0].dtype, key[1])
        self.tensors[key] = {"role": key[0], "name": key[1], "dtype": dtype, "shape": extents}
        self._parts[key] = [part.detach().reshape(-1) for part in parts]

    def add_lazy(self, key: Key, shape: Iterable[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        """Enter a tensor that is read as a whole when its turn comes."""
        entry = {"role": key[0], "name": key[1], "dtype": name_of(dtype, key[1]), "shape": list(shape)}
        self.tensors[key] = entry
        self._lazy[key] = (dtype, read)

    def shape(self, key: Key) -> list[int]:
        """The unsharded shape of a tensor."""
        return list(self.tensors[key]["shape"])

    def dtype(self, key: Key) -> torch.dtype:
        """The dtype in which a tensor is kept."""
        return self._lazy[key][0] if key in self._lazy else self._parts[key][0].dtype

    def agrees(self, key: Key, other: torch.Tensor) -> bool:
        """Whether a tensor of this shape has the same values, as far as its dtype can tell."""
        whole = torch.cat(self._parts[key])[: other.numel()]
        return torch.equal(whole.to(other.dtype), other.reshape(-1))

    def read(self, wanted: Iterable[Read]) -> None:
        """Read all of these; converted where dtypes differ."""
        for want in wanted:
            offset = 0
            for part in self._parts_of(want.key):
                start, stop = max(want.start, offset), min(want.stop, offset + part.numel())
                if start < stop:
                    want.out[start - want.start : stop - want.start].copy_(part[start - offset : stop - offset])
                offset += part.numel()

    def _parts_of(self, key: Key) -> list[torch.Tensor]:
        if key not in self._lazy:
            return self._parts[key]
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._lazy[key][1]().reshape(-1))
        return [self._last[1]]
