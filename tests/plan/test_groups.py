"""Grouping: one dtype and one trainability a layout, segments of a bounded size, nothing lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError

Param = tuple[str, int, str, bool]


@st.composite
def param_lists(draw: st.DrawFn) -> list[Param]:
    """Parameters of few kinds, so that kinds repeat."""
    row = st.tuples(st.integers(0, 500), st.sampled_from(["bf16", "fp32", "int8"]), st.booleans())
    return [(f"p{index}", *fields) for index, fields in enumerate(draw(st.lists(row, max_size=25)))]


def kind(layout: plan.ShardLayout) -> tuple[str, bool]:
    return layout.dtype, layout.trainable


@given(params=param_lists(), num_shards=st.integers(1, 9), segment_nbytes=st.none() | st.integers(1, 3000))
def test_nothing_is_lost_and_order_is_kept(params: list[Param], num_shards: int, segment_nbytes: int | None) -> None:
    layouts = plan.groups(params, num_shards, segment_nbytes=segment_nbytes)
    kinds = list(dict.fromkeys((dtype, trainable) for _, _, dtype, trainable in params))
    assert list(dict.fromkeys(kind(layout) for layout in layouts)) == kinds
    for wanted in kinds:
        expected = [(name, numel) for name, numel, *rest in params if tuple(rest) == wanted]
        own = [layout for layout in layouts if kind(layout) == wanted]
        assert [(name, numel) for layout in own for name, numel, _ in layout.entries()] == expected
        assert segment_nbytes is not None or len(own) == 1


@given(params=param_lists(), segment_nbytes=st.integers(1, 3000))
def test_segments_are_bounded_and_full(params: list[Param], segment_nbytes: int) -> None:
    def content_nbytes(layout: plan.ShardLayout) -> int:
        _, numel, offset = layout.entries()[-1]
        return (offset + numel) * layout.itemsize

    layouts = plan.groups(params, 2, segment_nbytes=segment_nbytes)
    assert all(content_nbytes(layout) <= segment_nbytes or len(layout) == 1 for layout in layouts)
    for before, after in pairwise(layouts):
        if kind(before) == kind(after):
            next_nbytes = after.entries()[0][1] * after.itemsize
            assert -(-content_nbytes(before) // 16) * 16 + next_nbytes > segment_nbytes


def test_alignment_and_iterables_are_passed_on() -> None:
    layouts = plan.groups(((name, 4, "fp32", True) for name in "ab"), num_shards=2, alignment=64)
    assert [(layout.names, layout.alignment, layout.shard_numel) for layout in layouts] == [(["a", "b"], 64, 16)]
    assert plan.groups([], 2) == []


@pytest.mark.parametrize("segment_nbytes", [0, -1])
def test_a_segment_of_nothing_is_refused(segment_nbytes: int) -> None:
    with pytest.raises(PlanError, match=r"segment_nbytes is .* or None for no limit"):
        plan.groups([], 2, segment_nbytes=segment_nbytes)


def test_one_name_in_two_kinds_is_refused() -> None:
    with pytest.raises(PlanError, match='"w" appears twice'):
        plan.groups([("w", 4, "fp32", True), ("w", 4, "bf16", True)], 2)
