"""The strategies and assertions for pipeline schedules that users apply to their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from shardcore import plan, testing
from shardcore.errors import PlanError
from shardcore.testing.orders import random_order, sources


@settings(deadline=None, max_examples=40)
@given(schedule=testing.schedules(lowered=None))
def test_every_schedule_that_is_drawn_can_be_executed(schedule: plan.PipelineSchedule) -> None:
    testing.assert_schedule(schedule)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda s: s.num_microbatches < s.num_ranks,
        lambda s: s.num_ranks > 1 and s.num_microbatches % s.num_ranks != 0,
        lambda s: s.name == "any-order" and len(set(s.placement)) < s.num_stages,
        lambda s: any(action.kind == "W" for action in s.program(0)),
        lambda s: s.is_lowered,
        lambda s: not s.is_lowered,
    ],
)
def test_what_breaks_schedulers_is_drawn(wanted) -> None:
    assert find(testing.schedules(lowered=None), wanted, settings=settings(database=None, max_examples=2000))


@given(schedule=testing.schedules(["gpipe"], max_ranks=3, max_microbatches=4), data=st.data())
def test_costs_fit_the_schedule(schedule: plan.PipelineSchedule, data: st.DataObject) -> None:
    costs = data.draw(testing.schedule_costs(schedule))
    assert schedule.simulate(**costs).makespan >= 0


def test_drawing_is_cheap_enough_for_health_checks() -> None:
    """The largest programs draw few numbers, so that examples are neither slow nor over hypothesis' maximum."""
    counts: list[int] = []

    @settings(deadline=None, max_examples=10, database=None, suppress_health_check=[])
    @given(data=st.data())
    def draw_both(data: st.DataObject) -> None:
        schedule = data.draw(testing.schedules(["any-order"], lowered=True))
        data.draw(testing.schedule_mutants(schedule, ["dropped"]))
        counts.append(data.conjecture_data.length)

    draw_both()
    assert max(counts) < 200, "bytes of choices; hypothesis gives up at 8192"


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown pipeline schedule 'pipedream': expected one of"):
        testing.schedules(["pipedream"])
    with pytest.raises(ValueError, match="unknown mutant kind 'typo': expected one of memory, dropped"):
        testing.schedule_mutants(plan.pipeline_schedule("gpipe", 2, 2), ["typo"])


@settings(max_examples=60)
@given(data=st.data(), max_ranks=st.integers(1, 4), max_microbatches=st.integers(1, 4))
def test_bounds_hold_for_every_name(data: st.DataObject, max_ranks: int, max_microbatches: int) -> None:
    bounds = {"max_ranks": max_ranks, "max_microbatches": max_microbatches}
    names = ["dualpipe", "1f1b", "any-order"] if data.draw(st.booleans()) else None
    schedule = data.draw(testing.schedules(names, **bounds))
    assert schedule.num_ranks <= max_ranks
    assert schedule.num_microbatches <= max_microbatches


def test_a_bidirectional_schedule_is_drawn_up_to_its_bounds() -> None:
    drawn = testing.schedules(["dualpipe"], max_ranks=3, max_microbatches=3)
    assert find(drawn, lambda s: (s.num_ranks, s.num_microbatches) == (2, 3), settings=settings(database=None))


def test_names_that_no_size_within_the_bounds_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="none of the schedules dualpipe has max_ranks=1"):
        testing.schedules(["dualpipe"], max_ranks=1)
    with pytest.raises(ValueError, match=r"none of the schedules \(no names\)"):
        testing.schedules([])
    with pytest.raises(ValueError, match=r"got the string '1f1b': write \['1f1b'\]"):
        testing.schedules("1f1b")


def test_schedules_need_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from shardcore import testing\n"
        "testing.schedules(['1f1b'])\n"
        "assert testing.MUTANT_KINDS and testing.assert_schedule and testing.pipeline_shapes()\n"
        "try: testing.twin\n"
        "except ImportError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "torch\n"), done.stderr


def test_every_public_name_is_there() -> None:
    assert [name for name in testing.__all__ if not hasattr(testing, name)] == []


def test_a_wrong_schedule_fails_with_its_grid() -> None:
    programs = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1", "1B1"]]
    wrong = plan.PipelineSchedule(programs, [0, 1], 2)
    with pytest.raises(AssertionError, match=r">1B1<"):
        testing.assert_schedule(wrong)


def test_a_schedule_that_holds_too_much_fails() -> None:
    gpipe = plan.pipeline_schedule("gpipe", 2, 4)
    testing.assert_schedule(gpipe, memory_cap=4)
    testing.assert_schedule(gpipe, memory_cap=400, activation=100)
    with pytest.raises(AssertionError, match="at most the cap of 3"):
        testing.assert_schedule(gpipe, memory_cap=3)


@given(
    placement=st.permutations([0, 0, 1, 1, 2]),
    num_microbatches=st.integers(1, 5),
    source=sources(),
)
def test_random_orders_are_whole(placement: list[int], num_microbatches: int, source) -> None:
    programs = random_order(placement, num_microbatches, source)
    plan.PipelineSchedule(programs, placement, num_microbatches).check()


@given(data=st.data())
def test_mutants_are_drawn_and_refused(data: st.DataObject) -> None:
    schedule = plan.pipeline_schedule("interleaved", 3, 6).lower()
    mutant = data.draw(testing.schedule_mutants(schedule))
    assert mutant.kind in testing.MUTANT_KINDS
    with pytest.raises(PlanError):
        mutant.check()


def test_without_hypothesis_the_message_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "from shardcore import testing\n"
        "assert testing.zoo and testing.spmd\n"
        "try: testing.schedules\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (
        "shardcore.testing.schedules needs hypothesis, which is not installed: pip install 'shardcore-torch[testing]'\n"
    )
