"""Pipeline schedules through their Python names: programs, checks, simulation, forms, errors."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore import plan, testing
from shardcore.errors import PlanError

NAMES = plan.schedule_names()


def texts(schedule: plan.PipelineSchedule, rank: int) -> list[str]:
    return [str(action) for action in schedule.program(rank)]


# ---------------------------------------------------------------------------------------------------------- programs


def test_the_contract_names_every_schedule() -> None:
    contract = (
        "1f1b gpipe eager-1f1b interleaved looped-bfs zb-h1 zb-h2 interleaved-zb zb-v v-half v-min dualpipe-v seq-1f1b"
    )
    assert set(contract.split()) <= set(NAMES)


def test_a_program_is_a_list_of_actions() -> None:
    schedule = plan.pipeline_schedule("1f1b", num_ranks=3, num_microbatches=4)
    assert texts(schedule, 2) == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"]
    assert schedule.placement == [0, 1, 2]
    match schedule.program(2)[0]:
        case plan.Action(kind, stage, microbatch):
            assert (kind, stage, microbatch) == ("F", 2, 0)
    assert plan.Action("F", 2, 0) == plan.Action.from_text("2F0") == schedule.program(2)[0]
    assert plan.Action("OPTIM", 1).microbatch is None
    assert len({plan.Action("F", 2, 0), plan.Action("F", 2, 0), plan.Action("B", 2, 0)}) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 13])
def test_every_micro_batch_runs_through_every_stage_once(name: str, num_microbatches: int) -> None:
    """Fault: a generator whose last rank emitted F1..Fm; faults: m < p and uneven m refused."""
    num_microbatches += num_microbatches % 2 if name == "dualpipe" else 0
    schedule = plan.pipeline_schedule(name, 4, num_microbatches)
    done = [action for rank in range(4) for action in schedule.program(rank)]
    units = num_microbatches * schedule.num_slices
    chain = schedule.num_stages // schedule.num_chains
    assert sum(action.kind == "F" for action in done) == units * chain
    assert sum(action.kind in "BI" for action in done) == units * chain
    assert sum(action.kind == "I" for action in done) == sum(action.kind == "W" for action in done)
    assert {action.microbatch for action in done} == set(range(units))
    schedule.check()


@settings(deadline=None, max_examples=40)
@given(schedule=testing.schedules(lowered=None))
def test_all_that_holds_for_every_schedule(schedule: plan.PipelineSchedule) -> None:
    testing.assert_schedule(schedule)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "v-half"])
def test_evaluation_works_on_every_placement(name: str) -> None:
    """Fault: evaluation where neighbouring stages share a rank raised an assertion."""
    placement = plan.pipeline_schedule(name, 4, 8).placement
    for num_microbatches in (1, 3, 8):
        schedule = plan.evaluation_schedule(placement, num_microbatches)
        schedule.check()
        schedule.lower().check(comm="blocking")
        assert {action.kind for rank in range(4) for action in schedule.program(rank)} == {"F"}
        assert len(schedule) == len(placement) * num_microbatches


# ---------------------------------------------------------------------------------------------------------- simulate


@settings(deadline=None, max_examples=80)
@given(schedule=testing.schedules(lowered=None), data=st.data())
def test_no_time_is_lost_or_made(schedule: plan.PipelineSchedule, data: st.DataObject) -> None:
    costs = data.draw(testing.schedule_costs(schedule))
    run = schedule.simulate(**costs)
    num_ranks = schedule.num_ranks
    assert len(run.busy) == len(run.peak) == num_ranks
    slack = 1e-9 * run.makespan
    assert max(run.busy) <= run.span + slack <= run.makespan + 2 * slack
    assert run.bubble_makespan == pytest.approx(idle(run.busy, run.makespan), abs=1e-9)
    assert run.bubble_span == pytest.approx(idle(run.busy, run.span), abs=1e-9)
    for rank in range(num_ranks):
        intervals = run.intervals(rank)
        assert len(intervals) == len(schedule.program(rank))
        assert all(0 <= start <= end <= run.makespan + slack for start, end in intervals)
        assert max((held for _, held in run.memory(rank)), default=0) == pytest.approx(run.peak[rank], rel=1e-9)


def idle(busy: list[float], total: float) -> float:
    return 1 - math.fsum(busy) / (len(busy) * total) if total else 0.0


def test_a_number_is_per_rank_and_a_list_per_stage() -> None:
    schedule = plan.pipeline_schedule("interleaved", 4, 8, num_chunks=2)
    whole = schedule.simulate(2, 4, 6, activation=1000, stash=100)
    parts = schedule.simulate([1] * 8, [2] * 8, [3] * 8, activation=[500] * 8, stash=[50] * 8)
    assert (whole.makespan, whole.span, whole.busy, whole.peak) == (
        parts.makespan,
        parts.span,
        parts.busy,
        parts.peak,
    )
    assert whole.busy == [8 * 12.0] * 4
    ones = schedule.simulate(2, 4, 6)
    assert [1000 * units for units in ones.peak] == schedule.simulate(2, 4, 6, activation=1000).peak


def test_a_fused_backward_has_its_own_cost() -> None:
    schedule = plan.pipeline_schedule("1f1b", 2, 4)
    assert schedule.simulate(1, 1, 1).makespan == 15
    assert schedule.simulate(1, 1, 1, fused_backward=1.5).makespan == 12.5
    assert schedule.simulate(1, 1, 1, fused_backward=[1.5, 1.5]).makespan == 12.5


def test_links_can_be_described() -> None:
    schedule = plan.pipeline_schedule("gpipe", 2, 2).lower()
    free = schedule.simulate(1, 1, 1).makespan
    assert schedule.simulate(1, 1, 1, hop=0.5).makespan == free + 1
    assert schedule.simulate(1, 1, 1, latency={(0, 1): 0.5}).makespan == free + 0.5
    assert schedule.simulate(1, 1, 1, message=[8, 8], bandwidth=16).makespan == free + 1
    assert schedule.simulate(1, 1, 1, message=8, bandwidth=16).makespan == free + 1
    assert schedule.simulate(1, 1, 1, hop=0.5, overlap=False).makespan > free + 1


F, B, I, W = 2, 5, 3, 2  # noqa: E741 - the field's names
CLOSED_FORMS = {
    "gpipe": lambda p, v: (p - 1) * (F + B),
    "1f1b": lambda p, v: (p - 1) * (F + B),
    "eager-1f1b": lambda p, v: (p - 1) * (F + B),
    "interleaved": lambda p, v: (p - 1) * (F + B) / v,
    "looped-bfs": lambda p, v: (p - 1) * (F + B) / v,
    "zb-h1": lambda p, v: (p - 1) * (F + I - min(F, W)),
    "interleaved-zb": lambda p, v: (p - 1) * (F + I - min(F, W)) / v,
    "seq-1f1b": lambda p, v: (p - 1) * (F + B) / v,
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_bubbles_match_their_closed_forms(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = plan.pipeline_schedule(name, num_ranks, num_microbatches)
    run = schedule.simulate(F, I, W)
    cuts = max(schedule.num_chunks, schedule.num_slices)
    bubble = CLOSED_FORMS[name](num_ranks, cuts)
    assert run.makespan - num_microbatches * (F + B) == pytest.approx(bubble, rel=1e-12)


PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, ".2431", ".1585", ".1083"),
    (8, 32, 18.513, 18.086, 9.331, 0.626, ".1985", ".1242", ".0837"),
    (8, 64, 18.546, 18.097, 9.321, 0.762, ".1240", ".0674", ".0444"),
    (16, 48, 11.347, 11.248, 8.132, 0.377, ".2552", ".1397", ".0672"),
    (16, 64, 11.307, 11.254, 8.101, 0.379, ".2082", ".1088", ".0516"),
    (16, 128, 11.325, 11.308, 8.109, 0.378, ".1251", ".0576", ".0266"),
]
"""Qi et al., "Zero Bubble Pipeline Parallelism" (2024), table 5, recomputed from the profiled costs of table 4."""


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"p{row[0]}-m{row[1]}")
def test_published_bubble_rates(row: tuple[Any, ...]) -> None:
    num_ranks, num_microbatches, *costs, one, h1, h2 = row
    for name, expected in (("1f1b", one), ("zb-h1", h1), ("zb-h2", h2)):
        run = plan.pipeline_schedule(name, num_ranks, num_microbatches).simulate(*costs)
        assert f"{run.bubble_span:.4f}" == f"0{expected}", name


# ------------------------------------------------------------------------------------------------------------- forms


@settings(deadline=None, max_examples=40)
@given(schedule=testing.schedules(lowered=None))
def test_schedules_are_values(schedule: plan.PipelineSchedule) -> None:
    for again in (
        plan.PipelineSchedule.from_text(schedule.to_text()),
        plan.PipelineSchedule.from_json(schedule.to_json()),
        pickle.loads(pickle.dumps(schedule)),
        schedule.with_programs([schedule.program(rank) for rank in range(schedule.num_ranks)]),
    ):
        assert (again, hash(again), again.digest()) == (schedule, hash(schedule), schedule.digest())
        assert (again.lowering, again.gating, again.comm) == (schedule.lowering, schedule.gating, schedule.comm)
    assert schedule.name in schedule.explain()
    action = schedule.program(0)[0]
    assert pickle.loads(pickle.dumps(action)) == action


@settings(deadline=None, max_examples=40)
@given(schedule=testing.schedules(lowered=None), data=st.data())
def test_simulations_are_values(schedule: plan.PipelineSchedule, data: st.DataObject) -> None:
    run = schedule.simulate(**data.draw(testing.schedule_costs(schedule)))
    for again in (pickle.loads(pickle.dumps(run)), copy.copy(run), copy.deepcopy(run)):
        assert (again, hash(again), repr(again)) == (run, hash(run), repr(run))
        assert (again.peak, again.busy, again.to_ascii()) == (run.peak, run.busy, run.to_ascii())
        assert all(again.intervals(rank) == run.intervals(rank) for rank in range(schedule.num_ranks))


def test_a_copy_of_a_simulation_has_the_same_links() -> None:
    schedule = plan.pipeline_schedule("1f1b", 2, 2).lower()
    links = {"latency": {(0, 1): 0.5}, "message": [8, 8], "bandwidth": 16, "overlap": False, "composite": 0.9}
    run = schedule.simulate(1, [1, 2], 1, hop=0.1, fused_backward=1.5, stash=0.5, **links)
    assert pickle.loads(pickle.dumps(run)) == run
    assert run != schedule.simulate(1, [1, 2], 1, hop=0.1, fused_backward=1.5, stash=0.5)


def test_syntheses_are_values() -> None:
    found = plan.synthesize(2, 4, 1, 2, 1, hop=0.1, memory_cap=2)
    for again in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert (again, hash(again), repr(again)) == (found, hash(found), repr(found))
        assert (again.schedule, again.value, again.gap) == (found.schedule, found.value, found.gap)
        assert (again.lower_bound, again.found_by) == (found.lower_bound, found.found_by)
    assert found != plan.synthesize(2, 4, 1, 2, 1, hop=0.2, memory_cap=2)


def test_another_order_is_another_schedule() -> None:
    one = plan.PipelineSchedule([["0F0", "0F1", "0B0", "0B1"]], [0], 2)
    other = plan.PipelineSchedule([["0F0", "0F1", "0B1", "0B0"]], [0], 2)
    assert one != other
    assert one.digest() != other.digest()
    assert plan.first_difference(one.to_json(), other.to_json())


def test_nothing_behind_a_text_is_dropped() -> None:
    """Fault: a parser that read "1F2 1B2" as one action and dropped the rest."""
    schedule = plan.pipeline_schedule("1f1b", 2, 3)
    for text, reader in (
        (schedule.to_text(), plan.PipelineSchedule.from_text),
        (schedule.to_json(), plan.PipelineSchedule.from_json),
    ):
        for junk in ("x", " 0F0", "\n0F0", "{}"):
            with pytest.raises(PlanError):
                reader(text + junk)
    with pytest.raises(PlanError):
        plan.Action.from_text("1F2 1B2")


def test_lowering_options_are_kept() -> None:
    lowered = plan.pipeline_schedule("zb-h1", 2, 4).lower(zero_stage=3, optimizer="post-validation", tied=[[0, 1]])
    assert lowered.is_lowered
    assert lowered.lowering == {
        "zero_stage": 3,
        "reduce": "once",
        "optimizer": "post-validation",
        "tied": [[0, 1]],
        "receives_ahead": 2,
        "max_unsharded": 2,
    }
    kinds = {action.kind for rank in range(2) for action in lowered.program(rank)}
    assert {"UNSHARD", "RESHARD", "REDUCE", "TIED_REDUCE", "OPTIM", "SEND_F", "RECV_B"} <= kinds
    again = plan.PipelineSchedule(
        [lowered.program(rank) for rank in range(2)],
        lowered.placement,
        4,
        name=lowered.name,
        comm=lowered.comm,
        lowering=lowered.lowering,
    )
    assert again == lowered


# ------------------------------------------------------------------------------------------------------------ errors


def one_rank(*actions: str, **options: Any) -> plan.PipelineSchedule:
    return plan.PipelineSchedule([list(actions)], [0], 1, **options)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plan.pipeline_schedule("2f2b", 2, 2), 'unknown pipeline schedule "2f2b": expected one of '),
        (lambda: plan.pipeline_schedule("1f1b", 0, 2), "num_ranks is 0: expected at least 1"),
        (lambda: plan.pipeline_schedule("1f1b", -1, 2), "num_ranks is -1: expected at least 1"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 0), "num_microbatches is 0: expected at least 1"),
        (lambda: plan.pipeline_schedule("interleaved", 2, 2, num_chunks=0), "num_chunks is 0: expected at least 1"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2, num_chunks=3), "1f1b"),
        (lambda: plan.pipeline_schedule("1f1b", 2**40, 2), "num_ranks is 1099511627776"),
        (lambda: plan.pipeline_schedule("zb-v", 2, 2, costs=(1, -1, 1)), "input_grad"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).program(2), "rank 2 is out of range"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).program(-1), "rank -1 is out of range"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(1, 1, float("nan")), "weight_grad"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate([1], 1, 1), "forward (a list of 1)"),
        (
            lambda: plan.pipeline_schedule("1f1b", 2, 2).check(comm="no"),
            'model "no": expected one of buffered, directed, pair-fifo, one-fifo, blocking, batched',
        ),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(comm="Blocking"), '; did you mean "blocking"?'),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(comm="batch"), '; did you mean "batched"?'),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(comm="blocking", capacity=1), "give one of them"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(capacity=-1), "capacity is -1"),
        (lambda: plan.pipeline_schedule("1F1B", 2, 2), '; did you mean "1f1b"?'),
        (lambda: plan.pipeline_schedule("interleave", 2, 2), '; did you mean "interleaved"?'),
        (lambda: plan.pipeline_schedule("Interleaved1F1B", 2, 2), '; did you mean "interleaved"?'),
        (lambda: plan.pipeline_schedule("ScheduleZBVZeroBubble", 2, 2), '; did you mean "zb-v"?'),
        (lambda: plan.pipeline_schedule("InterleavedZeroBubble", 2, 2), '; did you mean "interleaved-zb"?'),
        (lambda: plan.pipeline_schedule("ScheduleLoopedBFS", 2, 2), '; did you mean "looped-bfs"?'),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(memory_cap=1), "at most the cap of 1"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(memory_cap=[2, 0]), "rank 1, position 0"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(memory_cap=[2]), "one entry for each of the 2 ranks"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(1, 1, 1, message=[1, 1]), "message without bandwidth"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(1, 1, 1, bandwidth=2), "bandwidth without message"),
        (
            lambda: one_rank("0F0&", "0B0").simulate(1.7e308, 0, 0, fused_backward=1.7e308, composite=0),
            "beyond what a double can hold",
        ),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(memory_cap=float("nan")), "memory_cap = NaN"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).check(memory_cap=-1), "memory_cap = -1: expected a number of at"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2, 2), "has 1 chunk per rank, not 2"),
        (
            lambda: plan.PipelineSchedule.from_torch_csv("0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n").check(),
            "no program has messages at all: leave out what is not F, B, I or W",
        ),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).lower(zero_stage=4), "zero_stage is 4"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).lower(tied=[[0]]), "tied stages [0]"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).lower(reduce="per-microbatch"), "ZeRO stages 2 and 3 only"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).lower().lower(), "lowered already"),
        (lambda: plan.evaluation_schedule([0, 2], 1), "rank 2 is named"),
        (lambda: plan.evaluation_schedule([], 1), "number of stages is 0"),
        (lambda: plan.evaluation_schedule([0], 1, num_chains=3), "num_chains is 3: expected 1 or 2"),
        (lambda: one_rank("0F0", "1B0"), "rank 0, position 1, 1B0: there are stages 0 to 0 only"),
        (lambda: one_rank("0F0", "0B1"), "there are micro-batches 0 to 0 only"),
        (lambda: one_rank("0F0", "0X0"), 'rank 0, position 1, "0X0": unknown action "X": expected one of F, B, I, W, '),
        (lambda: one_rank("0F0", "0b0"), 'rank 0, position 1, "0b0": unknown action "b"'),
        (lambda: one_rank("0F0", "0SENDF0"), 'did you mean "SEND_F"?'),
        (lambda: one_rank("0F0", "0B00"), 'rank 0, position 1, "0B00": expected a micro-batch behind B, without'),
        (lambda: one_rank("0F0", ""), 'rank 0, position 1, "": expected an action such as 2F0'),
        (lambda: one_rank("0F0").with_programs([["0F0", "0B"]]), 'rank 0, position 1, "0B": expected a micro-batch'),
        (lambda: one_rank("0F0&"), "a composite joins compute actions"),
        (lambda: one_rank("0F0", name="a b"), 'schedule name "a b"'),
        (lambda: one_rank("0F0", gating="some"), 'unknown gating "some"'),
        (lambda: plan.PipelineSchedule([], [0], 1), "0 programs for 1 ranks"),
        (lambda: one_rank("0B0").check(), "0F0"),
        (lambda: plan.Action("X", 0, 0), 'unknown action "X"'),
        (lambda: plan.Action("F", 0), "F"),
        (lambda: plan.Action("OPTIM", 0, 1), "OPTIM"),
        (lambda: plan.Action("F", -1, 0), "stage is -1"),
        (lambda: plan.Action.from_text("F0"), "F0"),
        (lambda: plan.Action.from_text("0W0@1"), '"0W0@1": W has no slot'),
        (lambda: plan.Action("SEND_F", 0, 0, slot=1), "slot is 1: expected 0, because only receives, F, B and I"),
        (
            lambda: plan.PipelineSchedule.from_text(plan.pipeline_schedule("1f1b", 1, 1).to_text().rstrip("\n")),
            "expected a line break behind the last line",
        ),
        (lambda: plan.pipeline_schedule("1f1b", 4, 4, costs=(float("nan"), 1, 1)), "forward = NaN"),
        (lambda: plan.pipeline_schedule("dualpipe", 4, 4, costs=(1, -1, 1)), "input_grad = -1"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(10**400, 1, 1), "number that is too large"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(1, [1, -(10**400)], 1), "number that is too large"),
    ],
)
def test_bad_input_is_named(call: Any, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plan.pipeline_schedule("zb-v", 2, 2, costs=1), "costs are (forward, input_grad, weight_grad)"),
        (lambda: plan.pipeline_schedule("zb-v", 2, 2, costs={"fwd": 1}), 'unknown cost "fwd": expected forward,'),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate("a", 1, 1), "expected a number"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate({0: 10, 1: 1}, 1, 1), "numbers (per stage), got {0: 10"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(1, {2, 3}, 1), "numbers (per stage), got {2, 3}"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).simulate(1, 1, 1, hop=[0.1]), "expected a number, got [0.1]"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2.5), "expected an integer, got 2.5"),
        (lambda: plan.PipelineSchedule([[1]], [0], 1), "rank 0, position 0: a program is a list of actions"),
        (lambda: plan.PipelineSchedule([["0F0"], "1F0"], [0, 1], 1), "rank 1: a program is a list of actions"),
        (lambda: plan.PipelineSchedule([["0F0"], 7], [0, 1], 1), "rank 1: a program is a list of actions"),
        (lambda: one_rank("0F0", lowering={"zero": 1}), 'unknown option "zero" of a lowering'),
    ],
)
def test_what_is_no_number_or_name_is_a_type_error(call: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert text in str(caught.value)


def test_a_type_error_shows_the_start_of_a_long_argument() -> None:
    with pytest.raises(TypeError) as caught:
        plan.pipeline_schedule("1f1b", 2, 2).simulate(["x" * 1000], 1, 1)
    assert len(str(caught.value)) < 200


def test_a_type_error_names_its_argument() -> None:
    with pytest.raises(TypeError) as caught:
        plan.pipeline_schedule("1f1b", 2, 2).simulate(1, {0: 1}, 1)
    assert "'input_grad'" in "".join(caught.value.__notes__)


def test_each_rank_may_have_its_own_cap() -> None:
    schedule = plan.pipeline_schedule("1f1b", 2, 4)
    schedule.check(memory_cap=[2, 1])
    made = plan.synthesize(2, 4, 1, 1, 1, memory_cap=[2, 1])
    made.schedule.check(memory_cap=[2, 1])


def test_the_failing_cell_is_marked() -> None:
    schedule = plan.PipelineSchedule([["0F0", "0B0"], ["1B0", "1F0"]], [0, 1], 1)
    with pytest.raises(PlanError) as caught:
        schedule.check()
    assert ">1B0<" in str(caught.value)
