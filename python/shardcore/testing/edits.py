"""How the programs of a schedule are edited to make a mutant, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardcore import plan

Programs = list[list[plan.Action]]
"""One program a rank."""

Edit = Callable[[], Programs]
"""Makes edited programs; only the one that is chosen is made."""

Editor = Callable[[plan.PipelineSchedule, Programs], Iterator[Edit]]
"""All ways to make one kind of fault."""


def alone(action: plan.Action) -> plan.Action:
    """The action outside of its composite, so that it can be moved."""
    return plan.Action(action.kind, action.stage, action.microbatch, slot=action.slot)


# --------------------------------------------------------------------------------------------------------- how to edit


def replaced(programs: Programs, rank: int, program: list[plan.Action]) -> Programs:
    """The programs with another one for a rank."""
    return [program if other == rank else actions for other, actions in enumerate(programs)]


def without(programs: Programs, rank: int, position: int) -> Programs:
    """The programs without the action at a position."""
    return replaced(programs, rank, programs[rank][:position] + programs[rank][position + 1 :])


def with_action(programs: Programs, rank: int, position: int, action: plan.Action) -> Programs:
    """The programs with one action more, in front of a position."""
    return replaced(programs, rank, [*programs[rank][:position], action, *programs[rank][position:]])


def moved(programs: Programs, rank: int, position: int, to: int) -> Programs:
    """The action at ``position`` stands at ``to`` in the edited program."""
    return with_action(without(programs, rank, position), rank, to, programs[rank][position])


# -------------------------------------------------------------------------------------------------------- where to edit

BACKWARD = ("B", "I")
COMPUTES = ("F", "B", "I", "W")


def places(programs: Programs, *kinds: str) -> Iterator[tuple[int, int, plan.Action]]:
    """Rank, position and action of everything of these kinds."""
    for rank, program in enumerate(programs):
        for position, action in enumerate(program):
            if action.kind in kinds:
                yield rank, position, action


def position_of(programs: Programs, rank: int, kinds: Sequence[str], stage: int, microbatch: int | None) -> int | None:
    """Where a rank first has an action of one of these kinds for a stage and micro-batch; None if nowhere."""
    for position, action in enumerate(programs[rank]):
        if action.kind in kinds and (action.stage, action.microbatch) == (stage, microbatch):
            return position
    return None


def peer(schedule: plan.PipelineSchedule, message: plan.Action) -> int:
    """The rank at the other end of a send or a receive."""
    onward = message.kind in ("SEND_F", "RECV_B")
    return schedule.placement[message.stage + (1 if onward else -1)]
