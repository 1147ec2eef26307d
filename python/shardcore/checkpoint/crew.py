"""All ranks of a job doing something together: what fails on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from shardcore import comm, errors
from shardcore.errors import CheckpointError, RankMismatchError

if TYPE_CHECKING:
    from shardcore.mesh import Axis

_LISTED = 5
T = TypeVar("T")


class Crew:
    """The ranks along an axis, in step."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @property
    def rank(self) -> int:
        """This rank's position."""
        return self.axis.rank

    def do(self, what: str, act: Callable[[], T]) -> T:
        """Run ``act`` on every rank; returns this rank's result. Collective.

        Raises:
            Exception: this rank's own; or, of the class of the first other rank's, one with that rank's message.
        """
        mine: list[T] = []
        self.tell(what, lambda: mine.append(act()))
        return mine[0]

    def tell(self, what: str, act: Callable[[], Any], *, first_only: bool = False) -> list[Any]:
        """Run ``act`` on every rank (or on the first alone) and give every rank's result, which is JSON-like, to all.
        Collective; raises as :meth:`do`.
        """
        mine: Exception | None = None
        result = None
        if not first_only or self.rank == 0:
            try:
                result = act()
            except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must not wait for it
                mine = error
        told = [type(mine).__name__, str(mine)] if mine is not None else None
        everywhere = comm.exchange([told, result], self.axis, what)
        failed = [(rank, told) for rank, (told, _) in zip(self.axis.ranks, everywhere, strict=True) if told]
        if mine is not None:
            others = [rank for rank, _ in failed if rank != self.axis.ranks[self.rank]]
            if others:
                mine.add_note(f"ranks {others} failed, too")
            raise mine
        if failed:
            rank, (kind, text) = failed[0]
            raise _class_of(kind)(f"{what}: rank {rank} failed ({kind}): {text}")
        return [result for _, result in everywhere]

    def agree(self, what: str, value: Any, advice: str) -> None:
        """Raise on every rank unless all have the same JSON-like value. Collective.

        Raises:
            RankMismatchError: they have not; the message names the values.
        """
        everywhere = comm.exchange(value, self.axis, what)
        if all(other == everywhere[0] for other in everywhere):
            return
        told = [f"rank {rank}: {found!r}" for rank, found in zip(self.axis.ranks, everywhere, strict=True)]
        raise RankMismatchError(f"{what} differs between ranks ({', '.join(told[:_LISTED])}); {advice}")


def _class_of(name: str) -> type[Exception]:
    """The class of another rank's error, as far as it is one of ours."""
    found = getattr(errors, name, CheckpointError)
    return found if isinstance(found, type) and issubclass(found, errors.ShardcoreError) else CheckpointError
