"""Stage 3 obeys the coordinator of the Rust core: which groups to gather ahead, which to keep, which to release.

The first step of a kind (training, evaluation) is recorded and gathers each group at its use; from then on steps follow
a plan, and what departs from it is gathered on demand (:mod:`shardcore.plan`, ``PrefetchCoordinator``).
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal

from shardcore import plan
from shardcore.errors import ConfigError, RankMismatchError

if TYPE_CHECKING:
    from shardcore.zero.group import ShardGroup

_PATIENCE_S = 1.0
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchLimits:
    """How many bytes of gathered parameters stage 3 may hold, in all and ahead of their use."""

    budget: int | None = None
    """All gathered parameters, in use or not; a step that needs more is an error."""
    max_live_nbytes: int | None = None
    """As ``budget``, but what is in use at one moment may exceed it (``stage3_max_live_parameters``)."""
    prefetch_nbytes: int | None = None
    """No further gather starts while so much is gathered ahead (``stage3_prefetch_bucket_size``)."""
    max_reuse_nbytes: int | None = None
    """Parameters stay gathered between two uses only if what is used in between is no larger
    (``stage3_max_reuse_distance``).
    """
    persistence_nbytes: int = 0
    """Groups up to this size stay gathered to the end of the step (``stage3_param_persistence_threshold``)."""

    def __post_init__(self) -> None:
        """Raise unless all are whole numbers of bytes.

        Raises:
            ConfigError: the message names the argument.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                least = 1 if field.name == "budget" else 0
                none = ", or None for no limit" if field.default is None else ""
                object.__setattr__(self, field.name, _as_nbytes(field.name, value, least, none))


def _as_nbytes(name: str, value: object, least: int, none: str) -> int:
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]  # what is no integer is refused
    if number is None or not least <= number < 1 << 63:
        exact = int(value) if isinstance(value, float) and value.is_integer() and value >= least else "8 * 2**30"
        raise ConfigError(
            f"{name}={value!r}: expected bytes, as an int of {least} to 2^63 - 1{none}; write {name}={exact}"
            + ("" if isinstance(exact, int) else " for 8 GiB")
        )
    return number


def default_limits(unit_nbytes: Sequence[int], root_nbytes: int) -> PrefetchLimits:
    """Room for the unit in use, one more beside it, and what the model itself holds all the time."""
    return PrefetchLimits(max_live_nbytes=root_nbytes + 2 * max(unit_nbytes, default=0))


def shown_names(units: Sequence[str]) -> list[str]:
    """How plans call the groups whose units these are: by the unit, with a number where it has several groups."""
    total, seen = Counter(units), Counter[str]()
    names = []
    for unit in units:
        seen[unit] += 1
        names.append(unit if total[unit] == 1 else f"{unit} (group {seen[unit]} of {total[unit]})")
    return names


class Prefetcher:
    """Gathers and releases the groups of one model. Every gather is collective over the shard axis, and ranks with the
    same hooks start the same gathers in the same order. Where ranks are on different branches, ``takes_turns`` says so:
    then nothing is planned, and each group is gathered at its use.
    """

    def __init__(self, groups: Sequence[ShardGroup], limits: PrefetchLimits, takes_turns: Callable[[], bool]) -> None:
        self._groups = groups
        self._takes_turns = takes_turns
        names = shown_names([group.name.rpartition("#")[0] for group in groups])
        units = [(name, group.nbytes) for name, group in zip(names, groups, strict=True)]
        self.coordinator = plan.PrefetchCoordinator(units, **asdict(limits))
        self._numbers = {name: group.index for name, group in zip(names, groups, strict=True)}
        self._store = next((group.store for group in groups if group.store is not None), None)
        self._is_running = self._has_failed = False

    def begin(self, kind: str) -> None:
        """A forward of the model begins; what the last step left behind is released."""
        if self._has_failed:
            self.reset()
        if self._takes_turns():
            self._release(self.coordinator.reset())
            kind = "by turns"  # never ended, so never planned
        self._is_running = True
        release, start = self.coordinator.begin(kind)
        self._read_ahead(kind)
        self._release(release)
        self._start(start)

    def enter(self, group: ShardGroup, phase: Phase) -> None:
        """A use of ``group`` begins: what the plan says happens, and the group is there.

        Raises:
            PlanError: the groups in use do not fit into the budget.
        """
        if not self._is_running:
            self.begin("apart")  # a unit that is called by itself, outside the model's forward
        release, start, _ = self.coordinator.enter(group.index, phase)
        self._release(release)
        self._start(start)
        group.unshard(exact=False)

    def leave(self, group: ShardGroup, phase: Phase) -> None:
        """A use of ``group`` ends; what the plan does not keep is released."""
        self._release(self.coordinator.leave(group.index, phase))

    def end(self) -> None:
        """The step is over: everything is released, and the next step of this kind follows this one's plan."""
        if self._has_failed:
            self.reset()
        if self._is_running:
            self._is_running = False
            self._release(self.coordinator.reset() if self._takes_turns() else self.coordinator.end())

    def fail(self) -> None:
        """A forward has raised: what is there is released. What stays under way is left to the next step, or to
        :meth:`reset`, since other ranks may never join it.
        """
        self._has_failed = True
        deadline = time.monotonic() + _PATIENCE_S
        with suppress(RankMismatchError):  # what the forward raised says more
            for group in self._groups:
                group.reshard(within_s=deadline - time.monotonic())

    def reset(self) -> None:
        """The step has failed: everything is released, and its order is forgotten."""
        self._is_running = self._has_failed = False
        self._release(self.coordinator.reset())

    def _read_ahead(self, kind: str) -> None:
        """Let shards that rest on a disk come into host memory in the order in which the plan gathers them."""
        step = None if self._store is None else self.coordinator.plan(kind)
        if self._store is not None and step is not None:
            self._store.expect([self._numbers[name] for name, _, _ in step.gathers])

    def _release(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._groups[index].reshard()

    def _start(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._groups[index].start_unshard(exact=False)
