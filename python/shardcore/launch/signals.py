"""Stop signals of the launcher: the first one ends the ranks in good order, more of them change nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Stopped(BaseException):
    """A stop signal came before any rank was started."""


class StopSignals:
    """Turns the first stop signal of this process into an exception, and notes which it was."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first stop signal, if one has come."""
        self._exception: Callable[[signal.Signals], BaseException] = lambda signum: Stopped(signum.name)
        for signum in _STOP_SIGNALS:
            signal.signal(signum, self._on_signal)

    def raise_as(self, exception: Callable[[signal.Signals], BaseException]) -> None:
        """Raise this exception from now on."""
        self._exception = exception

    def _on_signal(self, signum: int, frame: object) -> None:
        if self.received is None:
            self.received = signal.Signals(signum)
            raise self._exception(self.received)
        # An exception now would interrupt the stopping itself.
        os.write(2, b"shardcore-launch: the ranks are being stopped, which takes a few seconds\n")
