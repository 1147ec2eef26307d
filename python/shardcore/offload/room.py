"""Which part of a piece of host memory is given to whom, and who has to leave for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Resident:
    """One that holds bytes [start, stop) of the memory."""

    index: int
    start: int
    stop: int
    under_way: Any = None
    """The transfer to or from the disk that was started last."""
    is_coming: bool = False
    """The transfer is a read, before whose end there is nothing."""
    is_newer: bool = False
    """The disk has older values."""
    reader: Any = None
    """The event after which a device has read it."""
    last_use: int = 0


class Order:
    """In which order residents will be needed, as far as it is known."""

    def __init__(self, indices: Sequence[int] = ()) -> None:
        self._indices = list(indices)
        self._at = 0
        self._places: dict[int, list[int]] = {}
        for place, index in enumerate(self._indices):
            self._places.setdefault(index, []).append(place)

    def advance(self, index: int) -> None:
        """``index`` is needed now; what should have been before is passed over."""
        place = self.next_use(index)
        if place is not None:
            self._at = place + 1

    def next_use(self, index: int) -> int | None:
        """The place of its next use; None where none is known."""
        places = self._places.get(index, [])
        found = bisect_left(places, self._at)
        return places[found] if found < len(places) else None

    def upcoming(self) -> list[tuple[int, int]]:
        """(place, index) of the uses to come."""
        return list(enumerate(self._indices))[self._at :]


def find_room(
    residents: Sequence[Resident],
    nbytes: int,
    capacity: int,
    *,
    may_leave: Callable[[Resident], bool],
    next_use: Callable[[Resident], int | None],
) -> tuple[int, list[Resident]] | None:
    """Where ``nbytes`` bytes find room, and who has to leave for it: the range that is missed last, or was used longest
    ago. None where all ranges have somebody who may not leave.

    Args:
        residents: in the order of their places.
    """
    best: tuple[tuple[float, int], int, list[Resident]] | None = None
    starts = [0, *(resident.stop for resident in residents)]
    for number, start in enumerate(starts):
        if start + nbytes > capacity:
            break
        inside = []
        for resident in residents[number:]:
            if resident.start >= start + nbytes:
                break
            inside.append(resident)
        if not inside:
            return start, []
        if all(map(may_leave, inside)):
            cost = min(_distance(next_use(resident), resident) for resident in inside)
            if best is None or cost > best[0]:
                best = cost, start, inside
    return None if best is None else (best[1], best[2])


def _distance(place: int | None, resident: Resident) -> tuple[float, int]:
    """Larger for those whose place is missed less."""
    return (float("inf") if place is None else place), -resident.last_use
