"""Every kind of fault is found through the Python names, wherever it is made; and only faults are."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore import plan, testing
from shardcore.errors import PlanError
from shardcore.testing.mutants import make_mutant
from shardcore.testing.orders import sources
from shardcore.testing.sharding_mutants import SHARDING

OF_MESSAGES = {"dropped-message", "send-first", "duplicate-send", "swapped-receives", "late-receive", "receive-ahead"}
COMM = ["buffered", "directed", "pair-fifo", "one-fifo", "blocking"]


def lowering(schedule: plan.PipelineSchedule, source: random.Random) -> dict[str, Any]:
    """Any keyword arguments of ``lower``; often two groups of stages that share weights between the same ranks."""
    zero_stage = source.choice([None, 0, 1, 2, 3, 3])
    by_ranks: dict[tuple[int, int], list[list[int]]] = {}
    for one, other in ((i, j) for j in range(schedule.num_stages) for i in range(j)):
        ranks = (schedule.placement[one], schedule.placement[other])
        by_ranks.setdefault((min(ranks), max(ranks)), []).append([one, other])
    pairs = [pairs for ranks, pairs in by_ranks.items() if len(set(ranks)) > 1 or source.random() < 0.2]
    first = source.choice(pairs) if pairs else []
    second = [group for group in first if not set(group) & set(first[0])][:1]
    return {
        "zero_stage": zero_stage,
        "reduce": source.choice(["once", "per-microbatch"]) if zero_stage in (2, 3) else "once",
        "optimizer": source.choice(["absent", "barrier", "post-validation"]),
        "tied": source.choice([[], first[:1] + second, first[:1] + second]),
        "max_unsharded": source.choice([1, 2, 3]),
    }


WANTS: dict[str, dict[str, Any]] = {
    "late-reduce": {"zero_stage": 2, "reduce": "per-microbatch"},
    "late-gather": {"zero_stage": 3},
    "early-release": {"zero_stage": 3},
    "crowded-gather": {"zero_stage": 3, "max_unsharded": 1},
}
"""Without these options a schedule has no place for a kind of fault."""


def fitting(kind: str, schedule: plan.PipelineSchedule, source: random.Random) -> plan.PipelineSchedule:
    """The schedule lowered for what a kind of fault concerns."""
    if kind in SHARDING:
        return schedule.lower(**lowering(schedule, source) | WANTS.get(kind, {}))
    return schedule.lower() if kind in OF_MESSAGES or source.random() < 0.5 else schedule


@pytest.mark.parametrize("kind", testing.MUTANT_KINDS)
@settings(deadline=None, max_examples=20)
@given(schedule=testing.schedules(), source=sources())
def test_every_mutant_is_killed(kind: str, schedule: plan.PipelineSchedule, source: random.Random) -> None:
    mutant = make_mutant(kind, fitting(kind, schedule, source), source)
    if mutant is not None:
        with pytest.raises(PlanError):
            mutant.check()


@pytest.mark.full
@pytest.mark.parametrize("kind", testing.MUTANT_KINDS)
def test_a_thousand_mutants_of_each_kind_are_killed(kind: str) -> None:
    source = random.Random(f"mutants {kind}")
    killed = 0
    while killed < 1000:
        name = source.choice([name for name in plan.schedule_names() if name != "dualpipe"])
        schedule = fitting(kind, plan.pipeline_schedule(name, source.randint(2, 6), source.randint(2, 12)), source)
        schedule.check()
        mutant = make_mutant(kind, schedule, source)
        if mutant is not None:
            with pytest.raises(PlanError):
                mutant.check()
            killed += 1


@pytest.mark.parametrize("kind", testing.MUTANT_KINDS)
def test_every_kind_has_places_in_ordinary_schedules(kind: str) -> None:
    source = random.Random(0)
    made = 0
    for name in ("1f1b", "interleaved", "zb-h1", "gpipe") * 10:
        schedule = plan.pipeline_schedule(name, 4, 8)
        made += make_mutant(kind, fitting(kind, schedule, source), source) is not None
    assert made >= 4, f"{made} mutants of kind {kind} can be made: the tests above would be empty"


def test_strategies_that_can_draw_nothing_are_refused() -> None:
    for bound in ("max_ranks", "max_microbatches", "max_chunks"):
        with pytest.raises(ValueError, match=f"{bound} is 0: expected at least 1"):
            testing.schedules(**{bound: 0})  # type: ignore[arg-type]
    schedule = plan.pipeline_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="no mutant of kind duplicate-send"):
        testing.schedule_mutants(schedule, ["duplicate-send"])
    testing.schedule_mutants(schedule.lower(), ["duplicate-send"])


@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_mutants_of_any_fitting_kind_can_be_drawn(data: st.DataObject) -> None:
    schedule = data.draw(testing.schedules(["1f1b", "zb-h1"], lowered=None))
    if not schedule.is_lowered and data.draw(st.booleans()):
        schedule = schedule.lower(**data.draw(testing.schedule_lowerings(schedule)))
    with pytest.raises(PlanError):
        data.draw(testing.schedule_mutants(schedule)).check()


@settings(deadline=None, max_examples=60)
@given(schedule=testing.schedules(), data=st.data())
def test_what_is_lowered_in_any_way_passes(schedule: plan.PipelineSchedule, data: st.DataObject) -> None:
    schedule.lower(**data.draw(testing.schedule_lowerings(schedule))).check()


@settings(deadline=None, max_examples=60)
@given(schedule=testing.schedules(), source=sources())
def test_what_programs_say_themselves_suffices(schedule: plan.PipelineSchedule, source: random.Random) -> None:
    lowered = schedule.lower(**lowering(schedule, source))
    lowered.check()
    said = plan.PipelineSchedule(
        [lowered.program(rank) for rank in range(lowered.num_ranks)],
        lowered.placement,
        lowered.num_microbatches,
        num_slices=lowered.num_slices,
        num_chains=lowered.num_chains,
        gating=lowered.gating,
    )
    said.check()
    for rank in range(lowered.num_ranks):
        assert said.program(rank) == lowered.program(rank)


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


EVALUATION = [["0F0", "0SEND_F0", "0F1", "0SEND_F1"], ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]]


@pytest.mark.parametrize("comm", [*COMM, "batched"])
def test_a_receive_that_nobody_sends_is_a_fault(comm: str) -> None:
    plan.PipelineSchedule(EVALUATION, [0, 1], 2).check(comm=comm)
    dangling = plan.PipelineSchedule([[*EVALUATION[0], "0RECV_B1"], EVALUATION[1]], [0, 1], 2)
    with pytest.raises(PlanError, match=r"0RECV_B1 \(rank 0, position 4\) waits for a message that no rank sends"):
        dangling.check(comm=comm)
    unsent = plan.PipelineSchedule([EVALUATION[0][:3], EVALUATION[1]], [0, 1], 2)
    with pytest.raises(PlanError, match=r"0SEND_F1 is missing.*1RECV_F1 \(rank 1, position 2\) waits for it"):
        unsent.check(comm=comm)


@pytest.mark.parametrize("comm", [*COMM, "batched"])
def test_a_send_that_nobody_receives_is_a_fault(comm: str) -> None:
    unreceived = plan.PipelineSchedule([EVALUATION[0], ["1RECV_F0", "1F0", "1F1"]], [0, 1], 2)
    with pytest.raises(PlanError, match=r"1F1 \(rank 1, position 2\) needs 1RECV_F1 before it, and no rank has it"):
        unreceived.check(comm=comm)


ONE_STAGE = {"zero_stage": 2, "reduce": "once", "optimizer": "barrier", "tied": []}
TWO_MICROBATCHES = "0F0 0B0 0F1 0B1 0REDUCE 0OPTIM"


@pytest.mark.parametrize(
    ("program", "options", "reason"),
    [
        (
            "0F0 0B0 0REDUCE 0F1 0B1 0OPTIM",
            {},
            "0REDUCE (rank 0, position 2): it stands before 1 weight gradient of stage 0",
        ),
        ("0F0 0B0 0F1 0B1 0OPTIM 0REDUCE", {}, "0OPTIM (rank 0, position 4): its gradients are not reduced yet"),
        (
            "0F0 0B0 0F1 0OPTIM 0B1 0REDUCE",
            {},
            "0OPTIM (rank 0, position 3): it stands before 1 weight gradient of stage 0",
        ),
        ("0F0 0B0 0F1 0B1 0REDUCE", {}, "0OPTIM is missing"),
        ("0F0 0B0 0F1 0B1 0OPTIM", {"zero_stage": None, "optimizer": "absent"}, "has no optimizer steps"),
        ("0F0 0B0 0F1 0B1 0REDUCE 0OPTIM", {"zero_stage": None}, "has no reductions"),
        ("0UNSHARD 0F0 0B0 0F1 0B1 0RESHARD 0REDUCE 0OPTIM", {}, "whole below ZeRO stage 3"),
        ("0F0 0B0 0F1 0B1 0TIED_REDUCE 0REDUCE 0OPTIM", {}, "has no tied weights of this stage"),
        (
            "0F0 0B0 0F1 0B1 0REDUCE 0REDUCE 0OPTIM",
            {"reduce": "per-microbatch"},
            "0B1 (rank 0, position 3): the weight",
        ),
        ("0F0 0B0 0REDUCE 0REDUCE 0F1 0B1 0OPTIM", {"reduce": "per-microbatch"}, "there is no weight gradient"),
        ("0F0 0REDUCE 0B0 0F1 0B1 0REDUCE 0OPTIM", {"reduce": "per-microbatch"}, "there is no weight gradient"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0F1 0B1 0REDUCE 0OPTIM", {"zero_stage": 3}, "0F1 (rank 0, position 4): its param"),
        ("0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE 0OPTIM", {"zero_stage": 3}, "0RESHARD is missing"),
    ],
)
def test_each_action_for_sharding_stands_in_its_place(program: str, options: dict[str, Any], reason: str) -> None:
    plan.PipelineSchedule([TWO_MICROBATCHES.split()], [0], 2, lowering=ONE_STAGE).check()
    schedule = plan.PipelineSchedule([program.split()], [0], 2, lowering=ONE_STAGE | options)
    with pytest.raises(PlanError) as caught:
        schedule.check()
    assert reason in str(caught.value)


def tied(first: str, last: str, **options: Any) -> plan.PipelineSchedule:
    programs = [
        f"0F0 0SEND_F0 0RECV_B0 0B0 {first}".split(),
        f"1RECV_F0 1F0 1B0 {last}".split(),
    ]
    return plan.PipelineSchedule(programs, [0, 1], 1, lowering={"tied": [[0, 1]]} | options)


@pytest.mark.parametrize(
    ("first", "last", "reason"),
    [
        ("0TIED_REDUCE", "1SEND_B0", "1TIED_REDUCE is missing"),
        ("0TIED_REDUCE 0TIED_REDUCE", "1SEND_B0 1TIED_REDUCE", "summed already"),
        ("0TIED_REDUCE", "1TIED_REDUCE 1SEND_B0", "deadlock"),
    ],
)
def test_sums_over_shared_weights_are_checked(first: str, last: str, reason: str) -> None:
    tied("0TIED_REDUCE", "1SEND_B0 1TIED_REDUCE").check(comm="blocking")
    for comm in COMM:
        with pytest.raises(PlanError) as caught:
            tied(first, last).check(comm=comm)
        assert reason in str(caught.value)


def test_a_sum_stands_between_gradients_reduction_and_step() -> None:
    options = {"zero_stage": 1, "optimizer": "post-validation"}
    last = "1SEND_B0 1TIED_REDUCE 1REDUCE 1OPTIM"
    tied("0TIED_REDUCE 0REDUCE 0OPTIM", last, **options).check()
    for first, reason in (
        ("0REDUCE 0TIED_REDUCE 0OPTIM", "0REDUCE (rank 0, position 4): it stands before 1 sum over its shared weights"),
        ("0OPTIM 0TIED_REDUCE 0REDUCE", "0OPTIM (rank 0, position 4): it stands before 1 sum over its shared weights"),
    ):
        with pytest.raises(PlanError) as caught:
            tied(first, last, **options).check()
        assert reason in str(caught.value)


def test_bounds_are_held() -> None:
    eager = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0F2", "0SEND_F2"],
        ["1RECV_F0", "1RECV_F1@1", "1RECV_F2@2", "1F0", "1F1@1", "1F2@2"],
    ]
    plan.PipelineSchedule(eager, [0, 1], 3, lowering={"receives_ahead": 3}).check()
    assert plan.PipelineSchedule(eager, [0, 1], 3).lowering["receives_ahead"] == 3
    with pytest.raises(
        PlanError,
        match=r"1RECV_F2@2 \(rank 1, position 2\) is posted with 2 receives of stage 1 .* receives_ahead is 2",
    ):
        plan.PipelineSchedule(eager, [0, 1], 3, lowering={"receives_ahead": 2}).check()
    gathers = [["0UNSHARD", "1UNSHARD", "0F0", "1F0", "0RESHARD", "1RESHARD"]]
    plan.PipelineSchedule(gathers, [0, 0], 1, lowering={"zero_stage": 3}).check()
    with pytest.raises(PlanError, match=r"1UNSHARD \(rank 0, position 1\): the rank holds 1 stage whole already"):
        plan.PipelineSchedule(gathers, [0, 0], 1, lowering={"zero_stage": 3, "max_unsharded": 1}).check()
