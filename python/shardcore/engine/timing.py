"""Host time of each phase of a step, for ``wall_clock_breakdown``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimes:
    """Adds up the seconds spent in named phases, as the host sees them: nothing is synchronised for it."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside."""
        if not self._enabled:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def report(self, log: logging.Logger, num_steps: int) -> None:
        """One line with the mean milliseconds per step of each phase; starts anew."""
        if self._enabled and self._seconds:
            log.info(
                "time (ms per step): %s",
                " | ".join(f"{k}: {v / num_steps * 1e3:.2f}" for k, v in self._seconds.items()),
            )
            self._seconds.clear()
