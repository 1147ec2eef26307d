"""Schedules travel to the installed torch and back: its own code reads our files, and we read its."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from torch.distributed.pipelining import schedules as torch_schedules

from plan.torch_form import WAITS
from shardcore import plan, testing
from shardcore.errors import PlanError

IN_TORCH = [name for name in plan.schedule_names() if name not in {"dualpipe", "seq-1f1b"}]
"""torch has neither two copies of a model nor slices of a sequence."""


def stages(num_ranks: int, num_stages: int, num_local: int) -> list[Any]:
    """As much of torch's pipeline stages as its schedules look at before they run."""
    common = {"num_stages": num_stages, "group_size": num_ranks, "group_rank": 0, "is_last": False, "submod": None}
    return [SimpleNamespace(stage_index=index * num_ranks, **common) for index in range(num_local)]


def read_by_torch(path: Path, schedule: plan.PipelineSchedule) -> Any:
    """The runtime that torch makes of our file."""
    path.write_text(schedule.to_torch_csv(waits=WAITS), newline="")
    local = stages(schedule.num_ranks, schedule.num_stages, len(schedule.stages(0)))
    runtime = torch_schedules._PipelineScheduleRuntime(local, schedule.num_microbatches, loss_fn=lambda *_: None)
    runtime._load_csv(path, format="compute_comms" if schedule.is_lowered else "compute_only")
    return runtime


def simulate_in_torch(runtime: Any) -> None:
    """torch's own check that a program runs to its end; it knows compute and messages, one by one."""
    simulated = ("F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
    order = {
        rank: [
            part
            for action in actions
            for part in action.sub_actions or (action,)
            if part.computation_type.value in simulated
        ]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    rank_of = runtime.stage_index_to_group_rank
    torch_schedules._simulate_comms_compute(order, lambda stage: rank_of[stage], len(rank_of))


def texts(schedule: plan.PipelineSchedule) -> list[list[str]]:
    return [
        [str(plan.Action(action.kind, action.stage, action.microbatch)) for action in schedule.program(rank)]
        for rank in range(schedule.num_ranks)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(schedule=testing.schedules([*IN_TORCH, "any-order"], lowered=None))
def test_torch_reads_what_we_write(schedule: plan.PipelineSchedule, tmp_path: Path) -> None:
    runtime = read_by_torch(tmp_path / "ours.csv", schedule)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    simulate_in_torch(runtime)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(schedule=testing.schedules([*IN_TORCH, "any-order"]))
def test_what_torch_lowers_reads_back(schedule: plan.PipelineSchedule, tmp_path: Path) -> None:
    runtime = read_by_torch(tmp_path / "ours.csv", schedule)
    runtime._dump_csv(tmp_path / "compute.csv", format="compute_only")
    again = plan.PipelineSchedule.from_torch_csv((tmp_path / "compute.csv").read_bytes().decode())
    assert (texts(again), again.placement) == (texts(schedule), schedule.placement)
    runtime._dump_csv(tmp_path / "lowered.csv")
    lowered = plan.PipelineSchedule.from_torch_csv((tmp_path / "lowered.csv").read_bytes().decode())
    lowered.check(comm="buffered")
    compute = [[text for text in program if text.lstrip("0123456789")[0] in "FBIW"] for program in texts(lowered)]
    assert compute == texts(schedule)


TORCHS_OWN = [
    ("ScheduleInterleaved1F1B", 2, {}),
    ("ScheduleLoopedBFS", 2, {}),
    ("ScheduleInterleavedZeroBubble", 2, {}),
    ("ScheduleZBVZeroBubble", 2, {}),
    ("ScheduleDualPipeV", 2, {}),
]


@pytest.mark.parametrize(("name", "num_chunks", "options"), TORCHS_OWN, ids=[name for name, *_ in TORCHS_OWN])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8)])
def test_we_read_what_torch_generates(
    name: str, num_chunks: int, options: dict[str, Any], num_ranks: int, num_microbatches: int, tmp_path: Path
) -> None:
    local = stages(num_ranks, num_ranks * num_chunks, num_chunks)
    theirs = getattr(torch_schedules, name)(local, num_microbatches, loss_fn=lambda *_: None, **options)
    for form in ("compute_only", "compute_comms"):
        theirs._dump_csv(tmp_path / "theirs.csv", format=form)
        ours = plan.PipelineSchedule.from_torch_csv((tmp_path / "theirs.csv").read_bytes().decode(), name=name)
        assert ours.is_lowered == (form == "compute_comms")
        assert (ours.num_ranks, ours.num_microbatches) == (num_ranks, num_microbatches)
        assert ours.placement == [theirs.stage_index_to_group_rank[stage] for stage in range(ours.num_stages)]
        ours.check()  # under the communication that reading found it fit for


def test_a_file_is_declared_for_the_strictest_communication_it_runs_under() -> None:
    lowered = plan.pipeline_schedule("1f1b", num_ranks=2, num_microbatches=4).lower()
    assert plan.PipelineSchedule.from_torch_csv(lowered.to_torch_csv()).comm == "blocking"
    # Both ranks reach a send on the pair first: rank 0 the second forward, rank 1 the first gradient.
    receives_late = (
        "0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\r\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\r\n"
    )
    schedule = plan.PipelineSchedule.from_torch_csv(receives_late)
    assert schedule.comm == "directed"
    schedule.check()
    with pytest.raises(PlanError, match="pair-fifo"):
        schedule.check(comm="pair-fifo")


LOWERINGS = [
    {"zero_stage": None},
    {"zero_stage": 0},
    {"zero_stage": 2, "reduce": "per-microbatch"},
    {"zero_stage": 3, "max_unsharded": 1},
    {"zero_stage": 3, "reduce": "per-microbatch", "max_unsharded": 3},
]


@pytest.mark.parametrize("options", LOWERINGS, ids=str)
@pytest.mark.parametrize("waits", [True, False])
@settings(deadline=None, max_examples=8)
@given(schedule=testing.schedules([*IN_TORCH, "any-order"], max_ranks=4, max_microbatches=6))
def test_every_action_travels_there_and_back(
    schedule: plan.PipelineSchedule, options: dict[str, Any], waits: bool
) -> None:
    """Fault: a file read back for communication only, so that none of its other actions was checked."""
    lowered = schedule.lower(**options)
    text = lowered.to_torch_csv(waits=waits)
    again = plan.PipelineSchedule.from_torch_csv(text)
    again.check()
    assert (texts(again), again.to_torch_csv(waits=waits)) == (texts(lowered), text)
    assert again.is_lowered or (schedule.num_ranks == 1 and options["zero_stage"] is None)
    said = again.lowering or {"zero_stage": None, "reduce": "once", "max_unsharded": 2}
    assert said["max_unsharded"] <= max(2, options.get("max_unsharded", 2))
    if schedule.num_microbatches > 1:  # with one, a reduction per micro-batch is one per step
        assert (said["zero_stage"], said["reduce"]) == (options["zero_stage"], options.get("reduce", "once"))


@pytest.mark.parametrize("kind", ["UNSHARD", "RESHARD", "REDUCE_GRAD"])
def test_files_that_lack_an_action_for_sharding_do_not_pass(kind: str) -> None:
    text = plan.pipeline_schedule("interleaved", 2, 4).lower(zero_stage=3).to_torch_csv(waits=False)
    row, *rest = text.split("\r\n")
    cells = row.split(",")
    cells.remove(next(cell for cell in cells if cell.lstrip("0123456789") == kind))
    schedule = plan.PipelineSchedule.from_torch_csv("\r\n".join([",".join(cells), *rest]))
    with pytest.raises(PlanError, match=r"is missing|gathered"):
        schedule.check()


def test_waits_stand_where_torch_wants_them() -> None:
    schedule = plan.pipeline_schedule("1f1b", num_ranks=2, num_microbatches=2).lower(zero_stage=3)
    rows = [row.split(",") for row in schedule.to_torch_csv().split("\r\n")[:-1]]
    assert rows[0].index("0WAIT_SEND_F0") == rows[0].index("0B0") + 1
    assert rows[1][-1] == "1WAIT_SEND_B1"
    for row in rows:
        reduce = next(cell for cell in row if cell.endswith("REDUCE_GRAD"))
        assert row[row.index(reduce) + 1] == reduce.replace("REDUCE", "WAIT_REDUCE")
    assert "WAIT" not in schedule.to_torch_csv(waits=False)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "line 1, column 1", "the file is empty"),
        ("0F0,0B0junk\r\n", "line 1, column 5", '"0B0junk" is no action'),
        ("1F2 1B2\r\n", "line 1, column 1", '"1F2 1B2" is no action'),
        ("0F0,0X0\n", "line 1, column 5", "expected a kind that torch knows"),
        ("0F0,0F\n", "line 1, column 5", "expected the number of a micro-batch"),
        ("0F0,0UNSHARD1\n", "line 1, column 5", "takes no micro-batch"),
        ("0F0,0OPTIM\n", "line 1, column 5", "torch has no such kind"),
        ("0F0,0WAIT_SEND_F0\n", "line 1, column 5", "waits for what has not been started"),
        ("0F0,0WAIT_F0\n", "line 1, column 5", "only sends and reductions are waited for"),
        ("0F0\n\n1F0\n", "line 2, column 1", "rank 1 computes nothing"),
        ("0F0\n0B0\n", "line 2, column 1", "0B0 is on rank 1, but stage 0 was on rank 0"),
        ("0F0,0RECV_B0\n1F0,0RECV_F0\n", "line 2, column 5", "0RECV_F0 is on rank 1, but stage 0 was on rank 0"),
        ("0F0\n2F0\n", "line 3, column 1", "stage 1 is nowhere"),
        ("0F0,(0F1;0B0)\n", "line 1, column 5", "is no composite"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", "line 1, column 10", "cannot be part of a composite"),
        ("0F0,(0F1)OVERLAP_F_B\n", "line 1, column 5", "at least two parts"),
        ("0F0,0F99999999999\n", "line 1, column 5", "expected the number of a micro-batch"),
        ("99999999999F0\n", "line 1, column 1", "expected a stage"),
        ("0F0,0F00\n", "line 1, column 5", "without leading zeros"),
        ("0F0\n01F0\n", "line 2, column 1", "without leading zeros"),
        ("0F0,\u00a00B0\n", "line 1, column 5", "is no action"),
        ("0F0,0B0\u00a0\n", "line 1, column 5", "is no action"),
        ("0F0,0B0\u3000\n", "line 1, column 5", "is no action"),
        ("\ufeff0F0,0B0\n", "line 1, column 1", "is no action"),
        ("0F0,\t0B0\n", "line 1, column 5", "is no action"),
        ("0F0\r,0B0\n", "line 1, column 1", "is no action"),
        ("0F0,0B+0\n", "line 1, column 5", "is no action"),
        ("0F0,  0b0\n", "line 1, column 7", "did you mean B?"),
        ("0F0,0SENDF0\n", "line 1, column 5", "did you mean SEND_F?"),
        ("0F0,0REDUCE\n", "line 1, column 5", "it writes REDUCE_GRAD"),
    ],
)
def test_faults_are_named_with_their_place(text: str, place: str, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan.PipelineSchedule.from_torch_csv(text)
    assert place in str(caught.value)
    assert reason in str(caught.value)


def test_idle_steps_and_composites() -> None:
    text = '"",0F0,,0F1, (0F2;0B0)OVERLAP_F_B,0B1,0B2\r\n'
    schedule = plan.PipelineSchedule.from_torch_csv(text.removeprefix('"",'))
    assert [str(action) for action in schedule.program(0)] == ["0F0", "0F1", "0F2&", "0B0", "0B1", "0B2"]
    assert schedule.to_torch_csv() == "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\r\n"


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (lambda: plan.pipeline_schedule("seq-1f1b", 2, 2, 2), "no slices of a sequence"),
        (lambda: plan.evaluation_schedule([0, 1], 2), "without a backward"),
        (lambda: plan.pipeline_schedule("1f1b", 2, 2).lower(optimizer="barrier"), "rank 0 has 0OPTIM"),
        (lambda: plan.PipelineSchedule([["0F0", "0B0", "1F1", "1B1"]], [0, 0], 2, num_chains=2), "two copies"),
    ],
)
def test_what_torch_cannot_say_is_refused(schedule: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        schedule().to_torch_csv()
