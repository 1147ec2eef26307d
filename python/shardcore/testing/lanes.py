"""A lane whose copies are made late: a wait that is missing gives wrong numbers on a machine without a GPU too."""

from __future__ import annotations

import random
import weakref
from collections import deque

import torch

_POISON = 123.0


class CheckedLane:
    """Copies wait in a queue. Some are made when the next one starts, as ``seed`` draws it; a ticket's ``wait`` makes
    all up to its own. Until then the target holds poison.

    A copy that finds its source or its target freed, or the source written to since it was started, raises
    ``AssertionError``: on a GPU it would have read, or overwritten, what others put there.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._queue: deque[_Copy] = deque()
        self.num_late = 0
        """Copies that were made only when somebody waited."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> _Copy:
        """Queue a copy."""
        copy = _Copy(self, target, source)
        self._queue.append(copy)
        for _ in range(self._draw.randrange(3)):
            if self._queue:
                self._queue.popleft().make()
        return copy

    def finish_all(self) -> None:
        """Make all copies that are queued."""
        while self._queue:
            self._queue.popleft().make()

    def finish(self, copy: _Copy) -> None:
        """Make all copies up to this one."""
        while not copy.is_made:
            self._queue.popleft().make()
            self.num_late += 1


class _Place:
    """A tensor's memory, which is not kept alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._where = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self, which: str) -> torch.Tensor:
        """The tensor."""
        storage = self._storage()
        if storage is None:
            raise AssertionError(f"the {which} of a copy was freed before the copy was made")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._where)


class _Copy:
    def __init__(self, lane: CheckedLane, target: torch.Tensor, source: torch.Tensor) -> None:
        self._lane = lane
        target.fill_(_POISON)
        self._target, self._source = _Place(target), _Place(source)
        self._seen = source.detach().clone()
        self.is_made = False

    def make(self) -> None:
        """Copy what the source's memory holds now."""
        source, target = self._source.tensor("source"), self._target.tensor("target")
        if not torch.equal(source, self._seen):
            raise AssertionError("the source of a copy was written to before the copy was made")
        target.copy_(source)
        self.is_made = True

    def wait(self) -> None:
        """What follows comes after the copy."""
        self._lane.finish(self)
