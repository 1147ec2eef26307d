"""Lowered programs: what their messages cost, and how many receives wait at once."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from shardcore import plan
from shardcore.errors import PlanError

COUNTS = [(4, 8), (8, 32)]


def most_ahead(schedule: plan.PipelineSchedule) -> int:
    """The most receives of one stage and direction that a rank has posted and not used."""
    most = 0
    for rank in range(schedule.num_ranks):
        ahead: Counter[tuple[int, bool]] = Counter()
        for action in schedule.program(rank):
            if action.kind in ("RECV_F", "RECV_B"):
                ahead[action.stage, action.kind == "RECV_F"] += 1
                most = max(most, *ahead.values())
            elif action.kind in ("F", "B", "I") and (action.stage, action.kind == "F") in ahead:
                ahead[action.stage, action.kind == "F"] -= 1
    return most


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), COUNTS)
@pytest.mark.parametrize("name", plan.schedule_names())
def test_lowered_schedules_hide_their_messages(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Up to half a forward of latency costs a lowered program nearly nothing beyond what it costs the schedule, though
    lowering knows neither costs nor latency. With them, and room for all receives, it costs nothing at all."""
    schedule = plan.pipeline_schedule(name, num_ranks, num_microbatches)
    all_receives = schedule.num_microbatches * schedule.num_slices
    usual = schedule.lower()
    for times in [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0)]:
        for hop in (0.0, 0.1, 0.25, 0.5, 1.0, 2.0):
            hop *= times[0]
            ideal = schedule.simulate(*times, hop).makespan
            roomy = schedule.lower(costs=(*times, hop), receives_ahead=all_receives)
            assert roomy.simulate(*times, hop).makespan == pytest.approx(ideal, rel=1e-12)
            if hop <= 0.5 and times == (1.0, 1.0, 1.0):
                assert usual.simulate(*times, hop).makespan <= 1.02 * ideal


@pytest.mark.parametrize("hop", [0.25, 0.9, 1.5])
@pytest.mark.parametrize("name", plan.schedule_names())
def test_costs_never_make_a_lowered_schedule_worse(name: str, hop: float) -> None:
    costs = {"forward": 1.0, "input_grad": 1.2, "weight_grad": 0.7, "hop": hop}
    schedule = plan.pipeline_schedule(name, 4, 8)
    assert schedule.lower(costs=costs).simulate(**costs).makespan <= schedule.lower().simulate(**costs).makespan


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), COUNTS)
@pytest.mark.parametrize("name", plan.schedule_names())
def test_receives_ahead_is_a_bound(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = plan.pipeline_schedule(name, num_ranks, num_microbatches)
    for bound in (1, 2, 3, 8):
        lowered = lowered_within(schedule, bound)
        lowered.check(comm="blocking")
        assert lowered.lowering is not None
        assert most_ahead(lowered) <= lowered.lowering["receives_ahead"]


def lowered_within(schedule: plan.PipelineSchedule, bound: int) -> plan.PipelineSchedule:
    """Lowered within a bound, or within the least that the refusal names."""
    try:
        return schedule.lower(receives_ahead=bound)
    except PlanError as error:
        [needed] = re.findall(r"cannot run with fewer than (\d+)", str(error))
        return schedule.lower(receives_ahead=int(needed))


def test_receives_ahead_are_as_many_as_needed_unless_bounded() -> None:
    """A rank that takes its inputs in another order than they are made needs room for those between."""
    programs = [["0F0", "0F1", "0F2"], ["1F2", "1F1", "1F0"]]
    schedule = plan.PipelineSchedule(programs, [0, 1], 3)
    with pytest.raises(PlanError, match="receives_ahead is 2, but this program cannot run with fewer than 3"):
        schedule.lower(receives_ahead=2)
    lowering = schedule.lower().lowering
    assert lowering is not None
    assert lowering["receives_ahead"] == 3
    schedule.check(comm="blocking")


def test_parts_of_a_composite_wait_each_for_its_own_input() -> None:
    """What the first part makes comes back, by way of the other rank, as what the second part waits for."""
    programs = [["0F0", "0F1&", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    schedule = plan.PipelineSchedule(programs, [0, 1], 2, gating="own")
    schedule.check()
    lowered = schedule.lower()
    lowered.check(comm="blocking")
    assert lowered.simulate(1, 1, 1).makespan == schedule.simulate(1, 1, 1).makespan
    with pytest.raises(PlanError):
        plan.PipelineSchedule(programs, [0, 1], 2, gating="all").lower()
