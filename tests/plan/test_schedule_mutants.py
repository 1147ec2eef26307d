"""Every kind of fault is found through the Python names, wherever it is made; and only faults are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore import plan, testing
from shardcore.errors import PlanError
from shardcore.testing.mutants import make_mutant

OF_MESSAGES = {"dropped-message", "send-first", "duplicate-send", "swapped-receives", "late-receive"}
COMM = ["buffered", "directed", "pair-fifo", "one-fifo", "blocking"]


@pytest.mark.parametrize("kind", testing.MUTANT_KINDS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_mutant_is_killed(kind: str, data: st.DataObject) -> None:
    schedule = data.draw(testing.schedules(lowered=True if kind in OF_MESSAGES else None))
    mutant = data.draw(testing.schedule_mutants(schedule, [kind]))
    with pytest.raises(PlanError):
        mutant.check()


@pytest.mark.full
@pytest.mark.parametrize("kind", testing.MUTANT_KINDS)
def test_a_thousand_mutants_of_each_kind_are_killed(kind: str) -> None:
    source = random.Random(f"mutants {kind}")
    killed = 0
    while killed < 1000:
        name = source.choice([name for name in plan.schedule_names() if name != "dualpipe"])
        schedule = plan.pipeline_schedule(name, source.randint(2, 6), source.randint(2, 12))
        schedule = schedule.lower() if kind in OF_MESSAGES or source.random() < 0.5 else schedule
        mutant = make_mutant(kind, schedule, source)
        if mutant is not None:
            with pytest.raises(PlanError):
                mutant.check()
            killed += 1


@pytest.mark.parametrize("kind", testing.MUTANT_KINDS)
def test_every_kind_has_places_in_ordinary_schedules(kind: str) -> None:
    made = 0
    for name in ("1f1b", "interleaved", "zb-h1", "gpipe"):
        schedule = plan.pipeline_schedule(name, 4, 8)
        mutant = make_mutant(kind, schedule.lower() if kind in OF_MESSAGES else schedule, random.Random(0))
        made += mutant is not None
    assert made, f"no mutant of kind {kind} can be made: the test above would be empty"


@settings(deadline=None, max_examples=40)
@given(schedule=testing.schedules(lowered=True))
def test_what_a_strict_model_accepts_the_forgiving_ones_do_too(schedule: plan.PipelineSchedule) -> None:
    accepted = []
    for comm in COMM:
        try:
            schedule.check(comm=comm)
        except PlanError:
            accepted.append(False)
        else:
            accepted.append(True)
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[COMM.index(schedule.comm)], "not right under what it declares"


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_models_stay_in_order_on_programs_that_nobody_planned(data: st.DataObject) -> None:
    schedule = data.draw(testing.schedules(lowered=True))
    mutant = data.draw(testing.schedule_mutants(schedule, ["swapped-receives", "late-receive"]))
    accepted = []
    for comm in COMM:
        try:
            mutant.schedule.check(comm=comm)
        except PlanError:
            accepted.append(False)
        else:
            accepted.append(True)
    assert accepted == sorted(accepted, reverse=True)


def test_a_deferred_receive_deadlocks_under_rendezvous() -> None:
    """Fault: a pass that posts receives late. The smallest witness is 1F1B with p = 2, m = 4."""
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0F3 0SEND_F3 0RECV_B2 0B2 0RECV_B3 0B3"
    last = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3"
    schedule = plan.PipelineSchedule([first.split(), last.split()], [0, 1], 4, comm="directed")
    schedule.check(comm="directed")
    with pytest.raises(PlanError) as caught:
        schedule.check(comm="pair-fifo")
    assert "SEND" in str(caught.value)
