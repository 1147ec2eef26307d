"""Hypothesis strategies and assertions for pipeline schedules: shardcore's, and your own.

``schedules`` draws schedules that can be executed, ``schedule_lowerings`` what they may be lowered for,
``schedule_costs`` what their stages may cost, and ``schedule_mutants`` what every checker must refuse.
``assert_schedule`` holds one schedule to all that holds for every schedule. An example is in
``docs/pipeline-schedules.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError
from shardcore.testing.orders import random_order, sources

ANY_ORDER = "any-order"
"""The name under which ``schedules`` draws programs in a random order that can be executed."""

TOLERANCE = 1e-9
"""Relative tolerance where times are compared: they are sums of many doubles, added in different orders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """How large a pipeline is."""

    num_ranks: int
    """Ranks, at least 1."""
    num_microbatches: int
    """Micro-batches of a step: also fewer than ranks, and no multiple of them."""
    num_chunks: int
    """Stages on each rank."""


def pipeline_shapes(
    *, max_ranks: int = 6, max_microbatches: int = 12, max_chunks: int = 3
) -> st.SearchStrategy[PipelineShape]:
    """Sizes of pipelines, small ones first, with fewer micro-batches than ranks and odd ratios among them."""
    return st.builds(
        PipelineShape,
        num_ranks=st.integers(1, max_ranks),
        num_microbatches=st.integers(1, max_microbatches),
        num_chunks=st.integers(1, max_chunks),
    )


def schedules(
    names: Sequence[str] | None = None,
    *,
    max_ranks: int = 6,
    max_microbatches: int = 12,
    max_chunks: int = 3,
    lowered: bool | None = False,
) -> st.SearchStrategy[plan.PipelineSchedule]:
    """Schedules that can be executed: named ones, and random orders on random placements.

    ``names`` are those of ``plan.pipeline_schedule`` and ``"any-order"``; by default all. One that no size within the
    bounds has is left out: ``dualpipe`` takes an even number of ranks. ``lowered`` asks for programs with
    messages, without, or (``None``) for either; what sharding and the optimizer add as well is ``lower`` with what
    ``schedule_lowerings`` draws.

    Raises ``ValueError`` for an unknown name or a bound below 1, and if the bounds leave no name.
    """
    largest = PipelineShape(num_ranks=max_ranks, num_microbatches=max_microbatches, num_chunks=max_chunks)
    _check_bounds(largest)
    short = replace(largest, num_microbatches=1)  # it does not depend on them whether there is one, and to make it does
    wanted = [name for name in _known(names) if name == ANY_ORDER or _named(name, short, largest) is not None]
    if not wanted:
        listed = ", ".join(_known(names)) or "(no names)"
        raise ValueError(
            f"none of the schedules {listed} has max_ranks={max_ranks}, max_microbatches={max_microbatches} and "
            f"max_chunks={max_chunks} or less; raise these or name other schedules"
        )

    @st.composite
    def drawn(draw: st.DrawFn) -> plan.PipelineSchedule:
        name = draw(st.sampled_from(wanted))
        shape = draw(pipeline_shapes(max_ranks=max_ranks, max_microbatches=max_microbatches, max_chunks=max_chunks))
        schedule = _any_order(draw, shape) if name == ANY_ORDER else _named(name, shape, largest)
        if schedule is None:
            reject()
        return schedule.lower() if lowered or (lowered is None and draw(st.booleans())) else schedule

    return drawn()


def _check_bounds(largest: PipelineShape) -> None:
    for what in ("ranks", "microbatches", "chunks"):
        most = getattr(largest, f"num_{what}")
        if most < 1:
            raise ValueError(f"max_{what} is {most}: expected at least 1")


def _known(names: Sequence[str] | None) -> list[str]:
    """The names that were asked for. Raises ``ValueError`` for one that is none."""
    known = [*plan.schedule_names(), ANY_ORDER]
    if isinstance(names, str):
        raise ValueError(f"names is a sequence of names, got the string {names!r}: write [{names!r}]")
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown pipeline schedule {name!r}: expected one of {', '.join(known)}")
    return known if names is None else list(names)


def _named(name: str, shape: PipelineShape, largest: PipelineShape) -> plan.PipelineSchedule | None:
    """The named schedule of that shape, or of the nearest within the bounds that it can have; None if it has none."""
    even = shape.num_ranks + shape.num_ranks % 2  # a bidirectional pipeline wants that
    for num_chunks in (shape.num_chunks, None):
        for num_ranks in (shape.num_ranks, even if even <= largest.num_ranks else even - 2):
            with suppress(PlanError):
                return plan.pipeline_schedule(name, num_ranks, shape.num_microbatches, num_chunks)
    return None


def _any_order(draw: st.DrawFn, shape: PipelineShape) -> plan.PipelineSchedule:
    placement = draw(st.permutations([rank for rank in range(shape.num_ranks) for _ in range(shape.num_chunks)]))
    programs = random_order(placement, shape.num_microbatches, draw(sources()))
    return plan.PipelineSchedule(programs, placement, shape.num_microbatches, name=ANY_ORDER)


def schedule_lowerings(schedule: plan.PipelineSchedule) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments for ``schedule.lower``: every ZeRO stage, optimizer step and bound, and stages that share
    weights, in a group or two with no stage in common.
    """
    stages = st.permutations(range(schedule.num_stages))
    groups = st.lists(st.integers(2, 3), max_size=2)  # by the number of their stages

    def options(zero_stage: int | None) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries(
            {
                "zero_stage": st.just(zero_stage),
                "reduce": st.sampled_from(["once", "per-microbatch"] if zero_stage in (2, 3) else ["once"]),
                "optimizer": st.sampled_from(["absent", "barrier", "post-validation"]),
                "tied": st.builds(_cut, stages, groups),
                "max_unsharded": st.integers(1, 3),
            }
        )

    return st.sampled_from([None, 0, 1, 2, 3]).flatmap(options)


def _cut(stages: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Groups of so many stages each, as far as the stages go."""
    ends = list(accumulate(counts))
    return [sorted(stages[end - count : end]) for count, end in zip(counts, ends, strict=True) if end <= len(stages)]


def schedule_costs(schedule: plan.PipelineSchedule) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments for ``schedule.simulate``: zeros, huge ratios, per rank or per stage."""
    number = st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.sampled_from([1e-9, 0.3, 1e9]))
    stages = schedule.num_stages
    amount = st.one_of(number, st.lists(number, min_size=stages, max_size=stages))
    return st.fixed_dictionaries(
        {"forward": amount, "input_grad": amount, "weight_grad": amount},
        optional={"hop": number, "activation": amount, "stash": amount, "fused_backward": amount},
    )


def assert_schedule(
    schedule: plan.PipelineSchedule,
    *,
    comm: str | None = None,
    memory_cap: float | None = None,
    activation: Any = 1.0,
    stash: Any = None,
) -> None:
    """Assert what holds for every schedule that can be executed.

    It passes ``schedule.check`` with these arguments, and when lowered the communication that it declares; its text
    and JSON forms read back as itself; and at equal costs no rank is busy for longer than the schedule takes.

    Raises ``AssertionError`` with the grid, the failing cell marked, and the fewest actions that show the fault.
    """
    try:
        schedule.check(comm=comm, memory_cap=memory_cap, activation=activation, stash=stash)
        if not schedule.is_lowered:
            schedule.lower().check()
        run = schedule.simulate(1, 1, 1)
        copies = [
            plan.PipelineSchedule.from_text(schedule.to_text()),
            plan.PipelineSchedule.from_json(schedule.to_json()),
        ]
    except PlanError as error:
        raise AssertionError(str(error)) from error
    for copy in copies:
        if copy != schedule:
            raise AssertionError(f"{schedule!r} reads back as another schedule, {copy!r}")
    longest = max(run.busy)
    if not longest <= run.span * (1 + TOLERANCE) <= run.makespan * (1 + 2 * TOLERANCE):
        raise AssertionError(f"a rank is busy for {longest}, but the span is {run.span} of a makespan {run.makespan}")
