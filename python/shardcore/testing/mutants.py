"""Schedules with one fault each, made from schedules that can be executed: what every checker must refuse."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from hypothesis import reject
from hypothesis import strategies as st

from shardcore import plan
from shardcore.testing.orders import sources

Programs = list[list[plan.Action]]
"""One program a rank."""

Edit = Callable[[], Programs]
"""Makes edited programs; only the one that is chosen is made."""


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

    Kinds that concern messages apply to lowered schedules. A draw for which the schedule has no place is rejected.
    """
    for kind in kinds or ():
        if kind not in MUTANT_KINDS:
            raise ValueError(f"unknown mutant kind {kind!r}: expected one of {', '.join(MUTANT_KINDS)}")
    wanted = list(kinds or [kind for kind in MUTANT_KINDS if schedule.is_lowered or kind not in _MESSAGES])

    @st.composite
    def drawn(draw: st.DrawFn) -> Mutant:
        mutant = make_mutant(draw(st.sampled_from(wanted)), schedule, draw(sources()))
        if mutant is None:
            reject()
        return mutant

    return drawn()


def make_mutant(kind: str, schedule: plan.PipelineSchedule, source: random.Random) -> Mutant | None:
    """A mutant of that kind at a random place; None where the schedule has no place for it."""
    apart = [[_alone(action) for action in schedule.program(rank)] for rank in range(schedule.num_ranks)]
    if kind == "memory":
        return _memory(schedule, apart)
    edits = list((_COMPUTE | _MESSAGES)[kind](schedule, apart))
    if not edits:
        return None
    edited = source.choice(edits)()
    return Mutant(kind=kind, schedule=schedule.with_programs(edited), comm=_SHOWS_UNDER.get(kind))


def _alone(action: plan.Action) -> plan.Action:
    """The action outside of its composite, so that it can be moved."""
    return plan.Action(action.kind, action.stage, action.microbatch, slot=action.slot)


# --------------------------------------------------------------------------------------------------------- how to edit


def _replaced(programs: Programs, rank: int, program: list[plan.Action]) -> Programs:
    return [program if other == rank else actions for other, actions in enumerate(programs)]


def _without(programs: Programs, rank: int, position: int) -> Programs:
    return _replaced(programs, rank, programs[rank][:position] + programs[rank][position + 1 :])


def _with(programs: Programs, rank: int, position: int, action: plan.Action) -> Programs:
    return _replaced(programs, rank, [*programs[rank][:position], action, *programs[rank][position:]])


def _moved(programs: Programs, rank: int, position: int, to: int) -> Programs:
    """The action at ``position`` stands at ``to`` in the edited program."""
    return _with(_without(programs, rank, position), rank, to, programs[rank][position])


# -------------------------------------------------------------------------------------------------------- where to edit

_BACKWARD = ("B", "I")
_COMPUTES = ("F", "B", "I", "W")


def _places(programs: Programs, *kinds: str) -> Iterator[tuple[int, int, plan.Action]]:
    for rank, program in enumerate(programs):
        for position, action in enumerate(program):
            if action.kind in kinds:
                yield rank, position, action


def _position(programs: Programs, rank: int, kinds: Sequence[str], stage: int, microbatch: int | None) -> int | None:
    for position, action in enumerate(programs[rank]):
        if action.kind in kinds and (action.stage, action.microbatch) == (stage, microbatch):
            return position
    return None


def _peer(schedule: plan.PipelineSchedule, message: plan.Action) -> int:
    onward = message.kind in ("SEND_F", "RECV_B")
    return schedule.placement[message.stage + (1 if onward else -1)]


def _dropped(programs: Programs, *kinds: str) -> Iterator[Edit]:
    backwards = sum(1 for _ in _places(programs, "B", "I", "W"))
    for rank, position, action in _places(programs, *kinds):
        if backwards > 1 or action.kind != "B":  # without its only backward a program is one for evaluation
            yield partial(_without, programs, rank, position)


def _twice(programs: Programs, *kinds: str) -> Iterator[Edit]:
    return (partial(_with, programs, rank, position, action) for rank, position, action in _places(programs, *kinds))


def _relabelled(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    units = schedule.num_microbatches * schedule.num_slices
    for rank, position, action in _places(programs, *_COMPUTES) if units > 1 else ():
        other = plan.Action(action.kind, action.stage, ((action.microbatch or 0) + 1) % units, slot=action.slot)
        yield partial(_with, _without(programs, rank, position), rank, position, other)


def _before(programs: Programs, later: Sequence[str], earlier: Sequence[str]) -> Iterator[Edit]:
    """An action is moved in front of the one of the same stage and micro-batch that it needs."""
    for rank, position, action in _places(programs, *later):
        needed = _position(programs, rank, earlier, action.stage, action.microbatch)
        if needed is not None:
            yield partial(_moved, programs, rank, position, needed)


def _wrong_rank(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    for rank, position, action in _places(programs, *_COMPUTES) if schedule.num_ranks > 1 else ():
        other = (rank + 1) % schedule.num_ranks
        to = min(position, len(programs[other]))
        yield partial(_with, _without(programs, rank, position), other, to, action)


def _cycle(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Two ranks wait for each other, though the order on each one of them is right.

    The forward of a stage is moved behind the backward of another micro-batch. That one needs the backward of the next
    stage, which stands behind the forward there of the first micro-batch.
    """
    for rank, position, action in _places(programs, "F"):
        following = action.stage + 1
        if following % (schedule.num_stages // schedule.num_chains) == 0 or schedule.placement[following] == rank:
            continue
        other = schedule.placement[following]
        arrives = _position(programs, other, ("F",), following, action.microbatch)
        own = _position(programs, rank, _BACKWARD, action.stage, action.microbatch)
        for behind in range(position + 1, own or 0):
            back = programs[rank][behind]
            if back.kind in _BACKWARD and back.stage == action.stage:
                given = _position(programs, other, _BACKWARD, following, back.microbatch)
                if given is not None and arrives is not None and arrives < given:
                    yield partial(_moved, programs, rank, position, behind)


def _swapped_receives(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Two receives of one directed edge change places."""
    for kind in ("RECV_F", "RECV_B"):
        last: dict[tuple[int, int], tuple[int, plan.Action]] = {}
        for rank, position, action in _places(programs, kind):
            edge = (rank, _peer(schedule, action))
            if edge in last:
                before, earlier = last[edge]
                program = list(programs[rank])
                program[before], program[position] = action, earlier
                yield partial(_replaced, programs, rank, program)
            last[edge] = (position, action)


def _late_receive(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """A receive is posted behind a send to the very rank that sends to it, so both of them send first."""
    for rank, position, action in _places(programs, "RECV_F", "RECV_B"):
        readers = ("F",) if action.kind == "RECV_F" else _BACKWARD
        reader = _position(programs, rank, readers, action.stage, action.microbatch)
        for behind in range(position + 1, reader or 0):
            other = programs[rank][behind]
            if other.kind in ("SEND_F", "SEND_B") and _peer(schedule, other) == _peer(schedule, action):
                yield partial(_moved, programs, rank, position, behind)


def _memory(schedule: plan.PipelineSchedule, programs: Programs) -> Mutant | None:
    """The first stage runs its forwards ahead, past what any rank held at most before."""
    rank = schedule.placement[0]
    first = [action.kind == "F" and action.stage == 0 for action in programs[rank]]
    ahead = [action for action, is_first in zip(programs[rank], first, strict=True) if is_first]
    rest = [action for action, is_first in zip(programs[rank], first, strict=True) if not is_first]
    cap = max(schedule.simulate(1, 1, 1).peak)
    edited = schedule.with_programs(_replaced(programs, rank, ahead + rest))
    if edited.simulate(1, 1, 1).peak[rank] <= cap:
        return None
    return Mutant(kind="memory", schedule=edited, memory_cap=cap)


# --------------------------------------------------------------------------------------------------------------- kinds

Editor = Callable[[plan.PipelineSchedule, Programs], Iterator[Edit]]
"""All ways to make one kind of fault."""

_COMPUTE: dict[str, Editor] = {
    "dropped": lambda _, programs: _dropped(programs, *_COMPUTES),
    "relabelled": _relabelled,
    "backward-first": lambda _, programs: _before(programs, _BACKWARD, ("F",)),
    "weight-first": lambda _, programs: _before(programs, ("W",), ("I",)),
    "wrong-rank": _wrong_rank,
    "cycle": _cycle,
    "duplicate": lambda _, programs: _twice(programs, *_COMPUTES),
}
_MESSAGES: dict[str, Editor] = {
    "dropped-message": lambda _, programs: _dropped(programs, "SEND_F", "RECV_F", "SEND_B", "RECV_B"),
    "send-first": lambda _, programs: chain(
        _before(programs, ("SEND_F",), ("F",)), _before(programs, ("SEND_B",), _BACKWARD)
    ),
    "duplicate-send": lambda _, programs: _twice(programs, "SEND_F", "SEND_B"),
    "swapped-receives": _swapped_receives,
    "late-receive": _late_receive,
}
_SHOWS_UNDER = {"swapped-receives": "directed", "late-receive": "pair-fifo"}

MUTANT_KINDS = ("memory", *_COMPUTE, *_MESSAGES)
"""Kinds of fault that ``schedule_mutants`` makes."""
