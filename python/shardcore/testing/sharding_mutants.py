"""Faults in what a schedule gathers, reduces, sums over shared weights and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from shardcore import plan
from shardcore.testing.edits import COMPUTES, Edit, Editor, Programs, moved, places, replaced, with_action, without

SHARDS = ("UNSHARD", "RESHARD", "REDUCE", "TIED_REDUCE", "OPTIM")
"""Kinds of action that a schedule has for sharding, shared weights and the optimizer."""

_WEIGHT_GRADS = ("B", "W")


def _is_per_microbatch(schedule: plan.PipelineSchedule) -> bool:
    return (schedule.lowering or {}).get("reduce") == "per-microbatch"


def _dropped(_: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    return (partial(without, programs, rank, position) for rank, position, _ in places(programs, *SHARDS))


def _twice(_: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    for rank, position, action in places(programs, *SHARDS):
        yield partial(with_action, programs, rank, position, action)


def _undeclared(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """An action of a kind that the lowering does not have."""
    present = {action.kind for program in programs for action in program}
    for kind in SHARDS if schedule.is_lowered else ():
        for rank, program in enumerate(programs) if kind not in present else ():
            action = plan.Action(kind, schedule.stages(rank)[0])
            for position in range(len(program) + 1):
                yield partial(with_action, programs, rank, position, action)


def _before(programs: Programs, kind: str, needs: Callable[[plan.Action, plan.Action], bool]) -> Iterator[Edit]:
    """An action of that kind is moved in front of the last one that it must stand behind."""
    for rank, position, action in places(programs, kind):
        needed = [at for at, other in enumerate(programs[rank][:position]) if needs(action, other)]
        if needed:
            yield partial(moved, programs, rank, position, needed[-1])


def _early_reduce(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    needed = _WEIGHT_GRADS if _is_per_microbatch(schedule) else (*_WEIGHT_GRADS, "TIED_REDUCE")
    return _before(programs, "REDUCE", lambda own, other: own.stage == other.stage and other.kind in needed)


def _late_reduce(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Of a program with one reduction per micro-batch: behind the next weight gradient as well."""
    for rank, position, action in places(programs, "REDUCE") if _is_per_microbatch(schedule) else ():
        for behind, other in enumerate(programs[rank][position:], position):
            if other.stage == action.stage and other.kind in _WEIGHT_GRADS:
                yield partial(moved, programs, rank, position, behind)
                break


def _early_sum(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    needed = (*_WEIGHT_GRADS, "REDUCE") if _is_per_microbatch(schedule) else _WEIGHT_GRADS
    return _before(programs, "TIED_REDUCE", lambda own, other: own.stage == other.stage and other.kind in needed)


def _swapped_sums(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Two ranks sum over the same two groups, and one of them does so in another order."""
    groups: list[list[int]] = (schedule.lowering or {}).get("tied", [])
    own = {stage: [i for i, group in enumerate(groups) if stage in group] for stage in range(schedule.num_stages)}
    held = [
        {own[stage][0] for stage in schedule.stages(rank) if len(own[stage]) == 1}
        if schedule.num_chains == 1
        else set()
        for rank in range(schedule.num_ranks)
    ]
    for rank, program in enumerate(programs):
        sums = [(at, own[a.stage][0]) for at, a in enumerate(program) if a.kind == "TIED_REDUCE" and own[a.stage]]
        for (first, one), (second, other) in pairwise(sums):
            if one != other and any({one, other} <= held[peer] for peer in range(schedule.num_ranks) if peer != rank):
                edited = list(program)
                edited[first], edited[second] = edited[second], edited[first]
                yield partial(replaced, programs, rank, edited)


def _early_step(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """Before a gradient, a reduction or a sum of its stage; with a barrier before anything that is left of the rank."""
    waits = (schedule.lowering or {}).get("optimizer") == "barrier"

    def needs(own: plan.Action, other: plan.Action) -> bool:
        if waits:
            return other.kind not in ("UNSHARD", "RESHARD", "OPTIM")
        return own.stage == other.stage and other.kind in (*_WEIGHT_GRADS, "REDUCE", "TIED_REDUCE")

    return _before(programs, "OPTIM", needs)


def _late_gather(_: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """A stage is gathered behind a computation that uses it."""
    for rank, position, action in places(programs, "UNSHARD"):
        for behind, other in enumerate(programs[rank][position:], position):
            if other.stage == action.stage and other.kind in COMPUTES:
                yield partial(moved, programs, rank, position, behind)
                break


def _early_release(_: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    return _before(programs, "RESHARD", lambda own, other: own.stage == other.stage and other.kind in COMPUTES)


def _crowded_gather(schedule: plan.PipelineSchedule, programs: Programs) -> Iterator[Edit]:
    """A stage is gathered where its rank holds as many whole as it may."""
    most = (schedule.lowering or {}).get("max_unsharded", 0)
    for rank, position, _ in places(programs, "UNSHARD"):
        whole = 0
        for to, other in enumerate(programs[rank][:position]):
            whole += (other.kind == "UNSHARD") - (other.kind == "RESHARD")
            if whole == most and to + 1 < position:
                yield partial(moved, programs, rank, position, to + 1)


SHARDING: dict[str, Editor] = {
    "dropped-sharding": _dropped,
    "duplicate-sharding": _twice,
    "undeclared": _undeclared,
    "early-reduce": _early_reduce,
    "late-reduce": _late_reduce,
    "early-sum": _early_sum,
    "swapped-sums": _swapped_sums,
    "early-step": _early_step,
    "late-gather": _late_gather,
    "early-release": _early_release,
    "crowded-gather": _crowded_gather,
}
"""Kinds of fault that need a schedule lowered for sharding, shared weights or an optimizer."""
