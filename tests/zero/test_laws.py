"""The bitwise laws of stages: which runs agree to the last bit, and which within rounding."""

from __future__ import annotations

import pytest

from shardcore.testing import spmd
from zero.models import ZOO
from zero.twin import Recipe, largest_difference, train_sharded


@pytest.mark.parametrize("case", list(ZOO))
@pytest.mark.parametrize("clip", [None, 0.1])
@spmd(world=3)
def test_stages_agree_bit_for_bit(case: str, clip: float | None) -> None:
    """Stages 2 and 3 always; stage 1 with them where a window is one backward. Norms included."""
    runs = [train_sharded(Recipe(case=case, stage=stage, clip=clip, steps=5)) for stage in (1, 2, 3)]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        assert largest_difference(run.parameters, runs[0].parameters)[0] == 0.0


@pytest.mark.parametrize("case", ["odd", "tied", "gpt"])
@spmd(world=2)
def test_stages_agree_with_accumulation(case: str) -> None:
    """Stage 1 sums micro-batches before ranks, the others after: equal within 1e-6. Stages 2 and 3 bit for bit."""
    first, second, third = (
        train_sharded(Recipe(case=case, stage=stage, accumulation=4, clip=0.1, steps=5)) for stage in (1, 2, 3)
    )
    assert largest_difference(third.parameters, second.parameters)[0] == 0.0
    assert largest_difference(first.parameters, second.parameters)[0] <= 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_a_run_repeats_itself(stage: int) -> None:
    recipe = Recipe(case="gpt", stage=stage, steps=5, clip=0.1)
    first, second = train_sharded(recipe), train_sharded(recipe)
    assert first.losses == second.losses
    assert largest_difference(first.parameters, second.parameters)[0] == 0.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("segment_nbytes", [1, 64, 1 << 20])
@spmd(world=2)
def test_b5_b7_segments_of_any_size(stage: int, segment_nbytes: int) -> None:
    """Also smaller than one parameter."""
    recipe = Recipe(case="odd", stage=stage, steps=5, clip=0.1)
    small, whole = train_sharded(recipe, segment_nbytes=segment_nbytes), train_sharded(recipe)
    assert largest_difference(small.parameters, whole.parameters)[0] <= 1e-6
