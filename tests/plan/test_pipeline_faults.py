"""Faults of other pipelines that a plan decides: what is left out of a step, put in the wrong place, or never ends."""

from __future__ import annotations

import pytest

from shardcore import plan
from shardcore.errors import PlanError

NAMES = plan.schedule_names()
GRADS = {"B", "W"}


def program(schedule: plan.PipelineSchedule, stage: int) -> list[plan.Action]:
    """What the rank of a stage does with that stage, in order."""
    return [action for action in schedule.program(schedule.placement[stage]) if action.stage == stage]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_e9_shared_weights_are_summed_once_behind_the_last_gradient(name: str, num_microbatches: int) -> None:
    """Weight and bias of the first and the last stage are tied: two sums on each, and only then is it stepped."""
    schedule = plan.pipeline_schedule(name, 4, num_microbatches)
    last = schedule.num_stages // schedule.num_chains - 1
    lowered = schedule.lower(zero_stage=1, optimizer="barrier", tied=[[0, last], [0, last]])
    lowered.check(comm="blocking")
    copies = 1 if schedule.num_chains == 2 else 0  # both copies of a bidirectional pipeline's stage are summed as well
    for stage in (0, last):
        kinds = [action.kind for action in program(lowered, stage)]
        behind = kinds[max(at for at, kind in enumerate(kinds) if kind in GRADS) + 1 :]
        assert [kind for kind in behind if "SEND" not in kind] == ["TIED_REDUCE"] * (2 + copies) + ["REDUCE", "OPTIM"]
        assert kinds.count("TIED_REDUCE") == 2 + copies


def test_e9_a_sum_before_the_last_gradient_is_refused() -> None:
    early = ["0F0", "1F0", "1B0", "0B0", "0TIED_REDUCE", "0F1", "1F1", "1B1", "0B1", "1TIED_REDUCE"]
    with pytest.raises(PlanError, match=r"0TIED_REDUCE"):
        plan.PipelineSchedule([early], [0, 0], 2, lowering={"tied": [[0, 1]]}).check()


def test_e14_no_rank_and_no_part_is_empty() -> None:
    with pytest.raises(PlanError, match="rank 1 holds no stage, though rank 2 is named"):
        plan.evaluation_schedule([0, 2, 2], 3)
    with pytest.raises(PlanError, match="part 1 is empty"):
        plan.check_boundaries([0, 2, 2, 4], 4)
    weightless = plan.partition_layers([1, 1, 0, 0, 1, 1], 3, cut_nbytes=[1] * 5)
    assert plan.check_boundaries(weightless, 6) == weightless


@pytest.mark.parametrize("name", NAMES)
def test_e15_gradients_are_reduced_once_or_for_every_micro_batch(name: str) -> None:
    schedule = plan.pipeline_schedule(name, 4, 8)
    for options in (
        *({"zero_stage": zero_stage} for zero_stage in range(4)),
        *({"zero_stage": zero_stage, "reduce": "per-microbatch"} for zero_stage in (2, 3)),
    ):
        lowered = schedule.lower(**options)
        lowered.check(comm="blocking")
        for stage in range(schedule.num_stages):
            kinds = [action.kind for action in program(lowered, stage)]
            num_grads = sum(kind in GRADS for kind in kinds)
            each = options.get("reduce") == "per-microbatch"
            assert kinds.count("REDUCE") == (num_grads if each else 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 1), (8, 3), (8, 8), (8, 21), (16, 64)])
def test_every_schedule_lowers_by_default(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Fault: fewer micro-batches than ranks, and uneven ones, refused or hanging. As many receives are ahead as must
    be: inputs of a second chunk come while the rank is still in its first one."""
    num_ranks += num_ranks % 2 if name == "dualpipe" else 0
    schedule = plan.pipeline_schedule(name, num_ranks, num_microbatches)
    lowered = schedule.lower()
    lowered.check(comm="blocking")
    assert lowered.lowering is not None
    ahead = lowered.lowering["receives_ahead"]
    if ahead > 2:
        with pytest.raises(PlanError, match=f"cannot run with fewer than {ahead} "):
            schedule.lower(receives_ahead=ahead - 1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "v-min", "dualpipe-v"])
def test_evaluation_after_evaluation_ends(name: str) -> None:
    """Nothing waits for what another evaluation left: each message is received, and each slot free again."""
    placement = plan.pipeline_schedule(name, 4, 8).placement
    for num_microbatches in (1, 2, 7):
        lowered = plan.evaluation_schedule(placement, num_microbatches).lower()
        lowered.check(comm="blocking")
        actions = [action for rank in range(4) for action in lowered.program(rank)]
        kinds = [action.kind for action in actions]
        assert kinds.count("SEND_F") == kinds.count("RECV_F")
        assert set(kinds) <= {"F", "SEND_F", "RECV_F"}
