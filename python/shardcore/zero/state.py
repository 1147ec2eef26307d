"""The life of a group's parameters, as one table.

::

    SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED        stage 3: gathered for a use, then released
    UNSHARDED -> UNSHARDING -> UNSHARDED                 stages 1 and 2: gathered after each update

Gradients have their own life beside it (``group.reduce_grads``), since they are reduced while other units compute.
"""

from __future__ import annotations

from enum import Enum

from shardcore.errors import StateError


class ParamState(Enum):
    """Where the whole parameters of a group are."""

    SHARDED = "sharded"
    """Only this rank's shard exists; reading a parameter raises."""
    UNSHARDING = "unsharding"
    """A gather is under way; reading a parameter waits for it."""
    UNSHARDED = "unsharded"
    """Every parameter may be read."""


_NEXT = {
    ParamState.SHARDED: (ParamState.UNSHARDING,),
    ParamState.UNSHARDING: (ParamState.UNSHARDED,),
    ParamState.UNSHARDED: (ParamState.SHARDED, ParamState.UNSHARDING),
}


def check_move(unit: str, now: ParamState, then: ParamState) -> None:
    """Raise :class:`StateError` if a group may not go from ``now`` to ``then``."""
    if then not in _NEXT[now]:
        raise StateError(
            f"unit {unit!r} is {now.value} and cannot become {then.value}; after an exception in a step, call "
            "reset_iteration() on the engine (or shardcore.zero.reset_iteration(model)) before the next one"
        )
