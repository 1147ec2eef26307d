"""How a module's call ends, as its hooks must know: by an exception, or by a Ctrl-C, which passes them over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn


def running_call() -> FrameType | None:
    """The call of a module that runs the hook which asks; None where no such frame is found (compiled code).

    ``Module.__call__`` passes over its hooks where a forward is left by a ``KeyboardInterrupt``. Whoever keeps the
    frame can tell later by :func:`is_running` whether the call has ended.
    """
    return next((frame for frame in _stack() if frame.f_code.co_filename == nn.modules.module.__file__), None)


def is_running(call: FrameType) -> bool:
    """Whether a call that :func:`running_call` gave has not ended; asked in its thread."""
    return any(frame is call for frame in _stack())


def current_exception() -> BaseException | None:
    """The exception that a forward hook with ``always_call`` runs under, or None."""
    return sys.exc_info()[1]


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
