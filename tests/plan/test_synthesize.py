"""Schedules made for given costs, through the Python name: optima, caps, bounds, errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError

PROVEN = [
    (2, 4, 1, 20),
    (2, 4, 2, 13),
    (3, 6, 2, 25),
    (3, 6, 3, 20),
    (4, 4, 3, 18),
    (4, 4, 4, 15),
    (4, 8, 1, 72),
    (4, 8, 2, 41),
    (4, 8, 3, 31),
    (4, 8, 4, 27),
]
"""Ranks, micro-batches, cap, and the smallest makespan that there is at unit costs, by a constraint solver."""


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "cap", "best"), PROVEN)
def test_proven_optima_are_reached(num_ranks: int, num_microbatches: int, cap: int, best: int) -> None:
    made = plan.synthesize(num_ranks, num_microbatches, 1, 1, 1, memory_cap=cap)
    assert made.value == made.schedule.simulate(1, 1, 1).makespan == best
    assert made.lower_bound <= best
    assert made.gap == pytest.approx(best / made.lower_bound - 1)
    made.schedule.check(memory_cap=cap)


@pytest.mark.parametrize(("costs", "best"), [((2, 2, 1), 49), ((2, 3, 1), 60), ((3, 3, 2), 76)])
def test_proven_optima_at_unequal_costs_are_reached(costs: tuple[int, int, int], best: int) -> None:
    assert plan.synthesize(4, 8, *costs, memory_cap=4).value == best


@settings(deadline=None, max_examples=15)
@given(
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 8),
    costs=st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 1.7, 100.0])] * 3),
    hop=st.sampled_from([0.0, 0.3]),
    objective=st.sampled_from(["makespan", "span"]),
)
def test_never_worse_than_a_named_schedule_under_the_same_cap(
    num_ranks: int, num_microbatches: int, costs: tuple[float, ...], hop: float, objective: str
) -> None:
    made = plan.synthesize(num_ranks, num_microbatches, *costs, hop=hop, memory_cap=num_ranks, objective=objective)
    run = made.schedule.simulate(*costs, hop=hop)
    assert max(run.peak) <= num_ranks
    assert made.value == pytest.approx(getattr(run, objective), rel=1e-9)
    assert made.lower_bound <= made.value
    for name in ("1f1b", "zb-h1"):
        named = plan.pipeline_schedule(name, num_ranks, num_microbatches).simulate(*costs, hop=hop)
        assert max(named.peak) <= num_ranks
        assert made.value <= getattr(named, objective) * (1 + 1e-9)


def test_the_same_request_gives_the_same_schedule() -> None:
    first, second = (plan.synthesize(3, 7, 1.1, 1, 0.9, hop=0.2, memory_cap=[3, 2, 3]) for _ in range(2))
    assert first.schedule == second.schedule
    first.schedule.lower().check(comm="blocking", memory_cap=3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plan.synthesize(2, 2, 1, 1, 1, memory_cap=0.5), "may hold 0.5 and needs 1"),
        (lambda: plan.synthesize(2, 2, 1, 1, 1, memory_cap=[2]), "one entry for each of the 2 ranks"),
        (lambda: plan.synthesize(2, 2, 1, 1, 1, memory_cap=10**400), "number that is too large: expected at most"),
        (lambda: plan.synthesize(2, 2, 1, 1, 1, memory_cap=[2, 10**400]), "number that is too large"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(memory_cap=10**400), "number that is too large"),
        (
            lambda: plan.synthesize(2, 2, 1, 1, 1, objective="speed"),
            'unknown objective "speed": expected one of makespan',
        ),
        (lambda: plan.synthesize(2, 2, [1], 1, 1), "forward (a list of 1)"),
        (lambda: plan.synthesize(0, 2, 1, 1, 1), "num_ranks is 0"),
        (lambda: plan.synthesize(2, 0, 1, 1, 1), "num_microbatches is 0"),
        (lambda: plan.synthesize(2, 2, 1, 1, 1, placement=[0, 0]), "it has stages on 1 ranks, but num_ranks is 2"),
    ],
)
def test_bad_input_is_named(call: Any, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("hop", [3, 10, 50])
def test_slow_hops_are_waited_for_stage_by_stage(hop: int) -> None:
    """No named schedule of the V placement is as short as all forwards stage by stage and then all backwards."""
    num_ranks, num_microbatches = 4, 16
    placement = [0, 1, 2, 3, 3, 2, 1, 0]
    programs = [
        [f"{stage}F{mb}" for stage in (rank, 7 - rank) for mb in range(num_microbatches)]
        + [f"{stage}B{mb}" for stage in (7 - rank, rank) for mb in range(num_microbatches)]
        for rank in range(num_ranks)
    ]
    plain = plan.PipelineSchedule(programs, placement, num_microbatches).simulate(1, 1, 1, hop=hop)
    made = plan.synthesize(num_ranks, num_microbatches, 1, 1, 1, hop=hop, placement=placement)
    assert made.value <= plain.makespan


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan.pipeline_schedule(LONG, 2, 2),
        lambda: plan.synthesize(2, 2, 1, 1, 1, objective=LONG),
        lambda: plan.synthesize(2, 2, 1, 1, 1, memory_cap=LONG),
        lambda: plan.PipelineSchedule.from_torch_csv(LONG),
        lambda: plan.PipelineSchedule([[LONG]], [0], 1),
        lambda: plan.PipelineSchedule([["0F" + LONG]], [0], 1),
        lambda: plan.PipelineSchedule([LONG], [0], 1),
        lambda: plan.PipelineSchedule([["0F0", "0B0"]], [0], 1, name=LONG),
    ],
)
def test_messages_show_only_the_start_of_what_was_given(call: Any) -> None:
    with pytest.raises((PlanError, TypeError)) as caught:
        call()
    assert len(str(caught.value)) < 600
    assert "..." in str(caught.value)
