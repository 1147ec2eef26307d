"""Ranks that wait for one another in a circle: an error on each of them, where every single wait looks sound.

Along one axis, ranks that wait in different collectives see it from their histories (:mod:`shardcore.comm.watch`).
Along two axes they do not: rank 0 waits for rank 1 along the first, which waits for rank 3 along the second, and so
back to rank 0. So every rank that has waited for a while also publishes in which collective it waits and how far it
has come along each axis, and looks for a set of ranks each of which waits for ranks of the set alone. Nothing can ever
wake them, once all have been seen to wait at one moment.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from shardcore._torch_private import Store
from shardcore.comm import watch
from shardcore.errors import RankMismatchError

_BEATS = 2
"""So many times must each rank of a circle have published the same wait again: then all waited when it was first seen,
also those whose record was read last."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a waiting rank tells of itself."""

    axis: str
    """The key of the axis along which it waits, and the ranks of that axis."""
    ranks: list[int]
    sequence: int
    """The number of its collective on that axis."""
    where: str
    """The same in words."""
    entered: dict[str, int]
    """By the key of each axis: how many collectives it has entered."""
    beat: int = 0
    """How often it has published, all waits together."""

    def blockers(self, rank: int, waits: Mapping[int, Wait]) -> list[int]:
        """The other ranks that have not come to the collective, as far as ``waits`` tell; the rest may compute."""
        return [r for r in self.ranks if r != rank and (r not in waits or not waits[r]._has_come_to(self))]

    def _has_come_to(self, other: Wait) -> bool:
        waits_there = self.axis == other.axis and self.sequence >= other.sequence
        return waits_there or self.entered.get(other.axis, 0) > other.sequence


@dataclass(slots=True)
class Circles:
    """The looks of one rank."""

    store: Store
    rank: int
    beat: int = 0
    suspected: dict[int, Wait] = field(default_factory=dict)
    """The circle as it was seen first, by rank."""

    def find(self, wait: Wait, prefix: str) -> dict[int, Wait]:
        """Publish the wait of this rank, and return the circle that it is in for certain, by rank; or nothing.

        Args:
            prefix: of the keys in the store, the same on all ranks.
        """
        self.beat += 1
        wait = replace(wait, beat=self.beat)
        self.store.set(f"{prefix}{self.rank}", json.dumps(asdict(wait)))
        circle = closed_circle(self._read_reachable(wait, prefix), self.rank)
        before = self.suspected
        if circle.keys() != before.keys() or any(_moved(circle[rank], before[rank]) for rank in circle):
            self.suspected = circle
            return {}
        return circle if all(circle[rank].beat >= before[rank].beat + _BEATS for rank in circle) else {}

    def _read_reachable(self, wait: Wait, prefix: str) -> dict[int, Wait]:
        """The waits of this rank, of the ranks of its axis, of those of their axes, and so on."""
        waits = {self.rank: wait}
        seen, coming = {self.rank}, deque([wait])
        while coming:
            for rank in coming.popleft().ranks:
                key = f"{prefix}{rank}"
                if rank not in seen and self.store.check([key]):
                    waits[rank] = Wait(**json.loads(self.store.get(key)))
                    coming.append(waits[rank])
                seen.add(rank)
        return waits


def look(entry: watch.Entry) -> None:
    """Raise if this rank, which has waited for a while, can never go on.

    Raises:
        RankMismatchError: it is in a circle, which the message follows.
    """
    b = watch.board()
    if b.store is None:
        return
    if b.circles is None:
        b.circles = Circles(b.store, b.rank)
    wait = Wait(entry.axis.key, list(entry.axis.ranks), entry.sequence, watch.where(entry), dict(b.sequence))
    circle = b.circles.find(wait, watch.key_of(b, "waits/"))
    if circle:
        error = RankMismatchError(
            f"ranks wait for one another in a circle, for ever: {describe(circle, b.rank)}. Every rank must make the "
            "same calls of the model, backward, step, summon and state_dict in the same order. Where parameters are "
            "sharded and copied (Mesh(replicate=...)), ranks on different branches of a model may meet along both axes "
            "like this: use one axis, or the same branches on all ranks"
        )
        watch.report_failure(error)
        try:
            raise error
        finally:
            del error, circle  # as in `watch.raise_difference`


watch.on_silence(look)


def closed_circle(waits: Mapping[int, Wait], rank: int) -> dict[int, Wait]:
    """The largest set of ranks, this one among them, each of which waits for somebody, and for ranks of the set alone.

    Where one of several would be enough (a message from a root) it is still right: whoever it is, it is in the set.
    """
    circle = dict(waits)
    while True:
        free = [r for r, wait in circle.items() if not _is_held(wait.blockers(r, waits), circle)]
        if not free:
            return circle if rank in circle else {}
        for r in free:
            del circle[r]


def describe(circle: Mapping[int, Wait], rank: int) -> str:
    """The circle in words, from this rank on."""
    first = [rank, *sorted(circle.keys() - {rank})][:4]
    lines = [f"rank {r} waits for ranks {circle[r].blockers(r, circle)[:8]} in {circle[r].where}" for r in first]
    more = len(circle) - len(first)
    return "; ".join(lines) + (f"; and {more} ranks more" if more else "")


def _is_held(blockers: list[int], circle: Mapping[int, Wait]) -> bool:
    return bool(blockers) and all(rank in circle for rank in blockers)


def _moved(now: Wait, before: Wait) -> bool:
    return (now.axis, now.sequence, now.entered) != (before.axis, before.sequence, before.entered)
