"""The random numbers that a computation starts from, so that it can be repeated with the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardcore.protocols import RandomSource, random_sources


class RandomState:
    """Where torch's generators (the CPU's, and those of every CUDA device in use) and all registered sources stand."""

    def __init__(self) -> None:
        self._states: list[tuple[RandomSource, Any]] = [(source, source.get_state()) for source in _sources()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, random numbers are those that came after this state; afterwards all goes on as before.

        Sources that did not exist yet are left alone.
        """
        before = [(source, source.get_state()) for source, _ in self._states]
        _set(self._states)
        try:
            yield
        finally:
            _set(before)


def _sources() -> list[RandomSource]:
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices, *random_sources()]


def _set(states: list[tuple[RandomSource, Any]]) -> None:
    for source, state in states:
        source.set_state(state)
