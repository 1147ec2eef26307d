"""Buffers that a region's forward writes to: running statistics, vectors of a power iteration.

The second run must start from what the first one found, and must not be counted as one more step. Which buffers are
written to is found out once for each module and mode, by comparing their values; kernels do not tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

_Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class _Value:
    """A buffer and what it held."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    held: torch.Tensor

    @classmethod
    def of(cls, place: _Place) -> _Value | None:
        """What the place holds now; None for nothing."""
        owner, name = place
        buffer = owner._buffers.get(name)
        return None if buffer is None else cls(owner, name, buffer, buffer.detach().clone())

    def is_unchanged(self) -> bool:
        """Whether the same buffer holds the same."""
        return self.owner._buffers.get(self.name) is self.buffer and torch.equal(self.buffer, self.held)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make it so again."""
        self.buffer.copy_(self.held)
        self.owner._buffers[self.name] = self.buffer


_written: weakref.WeakKeyDictionary[nn.Module, dict[bool, list[str]]] = weakref.WeakKeyDictionary()
"""For each module and whether it trains: the full names of the buffers that its forward writes to."""


class Buffers:
    """The written buffers of a module as its first run found them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._mode = weakref.ref(module), module.training
        known = _written.get(module, {}).get(module.training)
        self._is_new = known is None
        names = [name for name, _ in module.named_buffers()] if known is None else known
        self._before = _values(module, names)

    def end_first_run(self) -> None:
        """Keep what was written to, and remember which that is."""
        module = self._module()
        if self._is_new and module is not None:
            self._before = {name: value for name, value in self._before.items() if not value.is_unchanged()}
            _written.setdefault(module, {})[self._mode] = list(self._before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, they hold what the first run found; afterwards what they do now."""
        module = self._module()
        if not self._before or module is None:
            yield
            return
        now = _values(module, self._before)
        for value in self._before.values():
            value.put_back()
        try:
            yield
        finally:
            for value in now.values():
                value.put_back()


def _values(module: nn.Module, names: Iterable[str]) -> dict[str, _Value]:
    found = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        value = _Value.of((module.get_submodule(owner), own))
        if value is not None:
            found[name] = value
    return found
