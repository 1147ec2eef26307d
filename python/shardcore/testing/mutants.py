"""Schedules with one fault each, made from schedules that can be executed: what every checker must refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from hypothesis import reject
from hypothesis import strategies as st

from shardcore import plan
from shardcore.testing.edits import (
    BACKWARD,
    COMPUTES,
    Edit,
    Editor,
    Programs,
    alone,
    moved,
    peer,
    places,
    position_of,
    replaced,
    with_action,
    without,
)
from shardcore.testing.orders import sources
from shardcore.testing.sharding_mutants import SHARDING, SHARDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A schedule with one fault, and how to look for it: ``schedule.check(comm=comm, memory_cap=memory_cap)``."""

    kind: str
    """One of ``MUTANT_KINDS``."""
    schedule: plan.PipelineSchedule
    """The schedule with the fault."""
    comm: str | None = None
    """The most forgiving communication under which the fault shows; None for what the schedule declares."""
    memory_cap: float | None = None
    """The cap that the schedule breaks, in micro-batches of a rank."""

    def check(self) -> None:
        """Check the schedule with these arguments. Raises ``PlanError``, or the checker has missed the fault."""
        self.schedule.check(comm=self.comm, memory_cap=self.memory_cap)


def schedule_mutants(schedule: plan.PipelineSchedule, kinds: Sequence[str] | None = None) -> st.SearchStrategy[Mutant]:
    """Mutants of a schedule that can be executed, of one of ``kinds`` each; by default of all that apply to it.

    Kinds that concern messages apply to lowered schedules, and those that concern gathers, reductions, sums over shared
    weights and optimizer steps to schedules that were lowered for them. A draw for which the schedule has no place is
    rejected.

    Raises ``ValueError`` for an unknown kind, and if none of ``kinds`` concerns what the schedule has.
    """
    for kind in kinds or ():
        if kind not in MUTANT_KINDS:
            raise ValueError(f"unknown mutant kind {kind!r}: expected one of {', '.join(MUTANT_KINDS)}")
    fitting = _fitting(schedule)
    wanted = [kind for kind in kinds or fitting if kind in fitting]
    if not wanted:
        raise ValueError(
            f"no mutant of kind {', '.join(kinds or ())} can be made of {schedule!r}: lower it for what the kind "
            f"concerns, or choose from {', '.join(fitting)}"
        )

    @st.composite
    def drawn(draw: st.DrawFn) -> Mutant:
        mutant = make_mutant(draw(st.sampled_from(wanted)), schedule, draw(sources()))
        if mutant is None:
            reject()
        return mutant

    return drawn()


def _fitting(schedule: plan.PipelineSchedule) -> list[str]:
    """The kinds that concern what the schedule has."""
    if not schedule.is_lowered:
        return ["memory", *_COMPUTE]
    has_sharding = any(action.kind in SHARDS for rank in range(schedule.num_ranks) for action in schedule.program(rank))
    return [kind for kind in MUTANT_KINDS if has_sharding or kind not in SHARDING]


def make_mutant(kind: str, schedule: plan.PipelineSchedule, source: random.Random) -> Mutant | None:
    """A mutant of that kind at a random place; None where the schedule has no place for it."""
    apart = [[alone(action) for action in schedule.program(rank)] for rank in range(schedule.num_ranks)]
    if kind == "memory":
        return _memory(schedule, apart)
    edits = list((_COMPUTE | _MESSAGES | SHARDING)[kind](schedule, apart))
    if not edits:
        return None
    edited = source.choice(edits)()
    return Mutant(kind=kind, schedule=schedule.with_programs(edited), comm=_SHOWS_UNDER.get(kind))


def _dropped(programs: Programs, *kinds: str) -> Iterator[Edit]:
    backwards = sum(1 for _ in places(programs, "B", "I", "W"))
    for rank, position, action in places(programs, *kinds):
        if backwards > 1 or action.kind != "B":  # without its only backward a program is one for evaluation
            yield partial(without, programs, rank, position)


def _twice(programs: Programs, *kinds: str) -> Iterator[Edit]:
    return (
        partial(with_action, programs, rank, position, action) for rank, position, action in places(programs, *kinds)
    )


def _relabelled(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    units = schedule.num_microbatches * schedule.num_slices
    for rank, position, action in places(programs, *COMPUTES) if units > 1 else ():
        other = plan.Action(action.kind, action.stage, ((action.microbatch or 0) + 1) % units, slot=action.slot)
        yield partial(with_action, without(programs, rank, position), rank, position, other)


def _before(programs: Programs, later: Sequence[str], earlier: Sequence[str]) -> Iterator[Edit]:
    """An action is moved in front of the one of the same stage and micro-batch that it needs."""
    for rank, position, action in places(programs, *later):
        needed = position_of(programs, rank, earlier, action.stage, action.microbatch)
        if needed is not None:
            yield partial(moved, programs, rank, position, needed)


def _wrong_rank(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    for rank, position, action in places(programs, *COMPUTES) if schedule.num_ranks > 1 else ():
        other = (rank + 1) % schedule.num_ranks
        to = min(position, len(programs[other]))
        yield partial(with_action, without(programs, rank, position), other, to, action)


def _cycle(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Two ranks wait for each other, though the order on each one of them is right.

    The forward of a stage is moved behind the backward of another micro-batch. That one needs the backward of the next
    stage, which stands behind the forward there of the first micro-batch.
    """
    for rank, position, action in places(programs, "F"):
        following = action.stage + 1
        if following % (schedule.num_stages // schedule.num_chains) == 0 or schedule.placement[following] == rank:
            continue
        other = schedule.placement[following]
        arrives = position_of(programs, other, ("F",), following, action.microbatch)
        own = position_of(programs, rank, BACKWARD, action.stage, action.microbatch)
        for behind in range(position + 1, own or 0):
            back = programs[rank][behind]
            if back.kind in BACKWARD and back.stage == action.stage:
                given = position_of(programs, other, BACKWARD, following, back.microbatch)
                if given is not None and arrives is not None and arrives < given:
                    yield partial(moved, programs, rank, position, behind)


def _swapped_receives(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Two receives of one directed edge change places."""
    for kind in ("RECV_F", "RECV_B"):
        last: dict[tuple[int, int], tuple[int, plan.Action]] = {}
        for rank, position, action in places(programs, kind):
            edge = (rank, peer(schedule, action))
            if edge in last:
                before, earlier = last[edge]
                program = list(programs[rank])
                program[before], program[position] = action, earlier
                yield partial(replaced, programs, rank, program)
            last[edge] = (position, action)


def _late_receive(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """A receive is posted behind a send to the very rank that sends to it, so both of them send first."""
    for rank, position, action in places(programs, "RECV_F", "RECV_B"):
        readers = ("F",) if action.kind == "RECV_F" else BACKWARD
        reader = position_of(programs, rank, readers, action.stage, action.microbatch)
        for behind in range(position + 1, reader or 0):
            other = programs[rank][behind]
            if other.kind in ("SEND_F", "SEND_B") and peer(schedule, other) == peer(schedule, action):
                yield partial(moved, programs, rank, position, behind)


def _receive_ahead(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """A receive is posted where as many of its stage and direction as may be are not used yet."""
    most = (schedule.lowering or {}).get("receives_ahead", 0)
    for rank, position, action in places(programs, "RECV_F", "RECV_B"):
        readers = ("F",) if action.kind == "RECV_F" else BACKWARD
        ahead = 0
        for to, other in enumerate(programs[rank][:position]):
            if other.stage == action.stage:
                ahead += (other.kind == action.kind) - (other.kind in readers)
            if ahead == most and to + 1 < position:
                yield partial(moved, programs, rank, position, to + 1)


def _memory(schedule: plan.PipelineSchedule, programs: Programs) -> Mutant | None:
    """The first stage runs its forwards ahead, past what any rank held at most before."""
    rank = schedule.placement[0]
    first = [action.kind == "F" and action.stage == 0 for action in programs[rank]]
    ahead = [action for action, is_first in zip(programs[rank], first, strict=True) if is_first]
    rest = [action for action, is_first in zip(programs[rank], first, strict=True) if not is_first]
    cap = max(schedule.simulate(1, 1, 1).peak)
    edited = schedule.with_programs(replaced(programs, rank, ahead + rest))
    if edited.simulate(1, 1, 1).peak[rank] <= cap:
        return None
    return Mutant(kind="memory", schedule=edited, memory_cap=cap)


# --------------------------------------------------------------------------------------------------------------- kinds

_COMPUTE: dict[str, Editor] = {
    "dropped": lambda _, programs: _dropped(programs, *COMPUTES),
    "relabelled": _relabelled,
    "backward-first": lambda _, programs: _before(programs, BACKWARD, ("F",)),
    "weight-first": lambda _, programs: _before(programs, ("W",), ("I",)),
    "wrong-rank": _wrong_rank,
    "cycle": _cycle,
    "duplicate": lambda _, programs: _twice(programs, *COMPUTES),
}
_MESSAGES: dict[str, Editor] = {
    "dropped-message": lambda _, programs: _dropped(programs, "SEND_F", "RECV_F", "SEND_B", "RECV_B"),
    "send-first": lambda _, programs: chain(
        _before(programs, ("SEND_F",), ("F",)), _before(programs, ("SEND_B",), BACKWARD)
    ),
    "duplicate-send": lambda _, programs: _twice(programs, "SEND_F", "SEND_B"),
    "swapped-receives": _swapped_receives,
    "late-receive": _late_receive,
    "receive-ahead": _receive_ahead,
}
_SHOWS_UNDER = {"swapped-receives": "directed", "late-receive": "pair-fifo"}

MUTANT_KINDS = ("memory", *_COMPUTE, *_MESSAGES, *SHARDING)
"""Kinds of fault that ``schedule_mutants`` makes."""
