"""Skip connections: a value set aside in one layer and taken up in a later one, in whatever stage that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardcore.errors import StateError

_current: ContextVar[dict[str, Any] | None] = ContextVar("skips", default=None)


def stash(name: str, value: Any) -> None:
    """Set ``value`` (tensors, or containers of them) aside; gradients flow back through it.

    It travels with what the stages pass to each other until a later layer takes it by :func:`pop`.

    Raises:
        StateError: called outside a pipeline's layers, or ``name`` is in use.
    """
    held = _held()
    if name in held:
        raise StateError(f"stash({name!r}): a value of this name is set aside already; pop it first, or use another")
    held[name] = value


def pop(name: str) -> Any:
    """Take up what an earlier layer has set aside as ``name``.

    Raises:
        StateError: called outside a pipeline's layers, or there is no such value.
    """
    held = _held()
    if name not in held:
        raise StateError(f"pop({name!r}): no earlier layer has stashed it; there is {sorted(held) or 'nothing'}")
    return held.pop(name)


@contextmanager
def holding(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inside, layers stash into and pop from ``values``."""
    token = _current.set(values)
    try:
        yield values
    finally:
        _current.reset(token)


def _held() -> dict[str, Any]:
    held = _current.get()
    if held is None:
        raise StateError("stash and pop work inside the layers of a shardcore.pipeline.Pipeline only")
    return held
