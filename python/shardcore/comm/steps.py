"""Collectives that follow one another behind one handle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from shardcore.comm import watch
from shardcore.comm.collectives import Handle

Step = Callable[[], Handle]


class After(Handle):
    """A collective under way, and what this rank does with its result."""

    __slots__ = ("_before",)

    def __init__(self, before: Handle, finish: Callable[[], None]) -> None:
        super().__init__((), None, finish)
        self._before = before

    def wait(self) -> None:
        """Wait for the data, and finish."""
        self._before.wait()
        super().wait()

    def is_complete(self, within_s: float = 0.0) -> bool:
        """Whether :meth:`wait` would return at once, now or ``within_s`` seconds from now."""
        return self._before.is_complete(within_s)


class Steps(Handle):
    """Collectives of which each starts when the one before it is complete: while somebody waits for the last, or before
    the next collective of this process.
    """

    __slots__ = ("_current", "_rest")

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__((), None)
        self._current = steps[0]()
        self._rest = deque(steps[1:])
        watch.board().unfinished = self

    def wait(self) -> None:
        """Wait for the last step.

        Raises:
            RankMismatchError: ranks are in different collectives, or one has failed.
        """
        self.start_rest()
        self._current.wait()

    def is_complete(self, within_s: float = 0.0) -> bool:
        """Whether :meth:`wait` would return at once. A step that has not started is missing on all ranks."""
        return not self._rest and self._current.is_complete(within_s)

    def start_rest(self) -> None:
        """Start the steps that are left, each when the one before it is complete."""
        while self._rest:
            self._current.wait()
            board = watch.board()
            if board.unfinished is self:
                board.unfinished = None
            self._current = self._rest[0]()
            self._rest.popleft()


class StreamSteps(Handle):
    """The same on CUDA: all steps are queued at once on a stream of their own, and nothing waits on the host."""

    __slots__ = ("_done", "_kept")

    def __init__(self, steps: Sequence[Step], stream: torch.cuda.Stream, *kept: torch.Tensor) -> None:
        super().__init__((), None)
        self._kept = kept
        """Tensors of another stream that the steps use: they stay referenced until that stream has waited."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in steps:
                step().wait()
            self._done = stream.record_event()

    def wait(self) -> None:
        """Let the current stream wait for the last step."""
        torch.cuda.current_stream().wait_event(self._done)
        self._kept = ()

    def is_complete(self, within_s: float = 0.0) -> bool:
        """Whether the last step is over, now or ``within_s`` seconds from now."""
        deadline = time.monotonic() + within_s
        while not self._done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True
