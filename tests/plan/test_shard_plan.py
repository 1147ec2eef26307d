"""Whole plans: units and groups, order of reduction, identity across processes, documents, differences, speed."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError

Unit = tuple[str, list[tuple[str, int, str, bool]]]


def model(num_layers: int = 3, numel: int = 100) -> list[Unit]:
    """Blocks of a frozen bias and a trainable weight and norm."""
    return [
        (
            f"layers.{index}",
            [
                (f"layers.{index}.weight", numel, "bf16", True),
                (f"layers.{index}.bias", 10, "bf16", False),
                (f"layers.{index}.norm", 10, "fp32", True),
            ],
        )
        for index in range(num_layers)
    ]


@st.composite
def unit_lists(draw: st.DrawFn) -> list[Unit]:
    row = st.tuples(st.integers(0, 300), st.sampled_from(["bf16", "fp32"]), st.booleans())
    units = draw(st.lists(st.lists(row, max_size=6), max_size=4))
    return [
        (f"unit é {index}", [(f"{index}.p{other}", *fields) for other, fields in enumerate(rows)])
        for index, rows in enumerate(units)
    ]


def test_groups_follow_units_and_reduction_runs_backwards() -> None:
    shards = plan.plan_shards(model(), num_shards=4)
    assert [unit for unit, _ in shards.groups] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [layout.names for _, layout in shards.groups[:3]] == [
        ["layers.0.weight"],
        ["layers.0.bias"],
        ["layers.0.norm"],
    ]
    assert shards.reduce_order == [8, 6, 5, 3, 2, 0]
    assert shards.units == ["layers.0", "layers.1", "layers.2"]
    assert (shards.num_shards, shards.alignment, shards.segment_nbytes, len(shards)) == (4, 256, None, 9)
    assert "3 units, 9 groups" in repr(shards)


def test_units_without_parameters_have_no_group() -> None:
    shards = plan.plan_shards([("", []), ("block", [("w", 8, "fp32", True)])], 2, segment_nbytes=64, alignment=32)
    assert [(unit, layout.names) for unit, layout in shards.groups] == [(1, ["w"])]
    assert (shards.segment_nbytes, shards.alignment) == (64, 32)
    empty = plan.plan_shards([], 2)
    assert (empty.groups, empty.reduce_order) == ([], [])


@given(units=unit_lists(), num_shards=st.integers(1, 9), segment_nbytes=st.none() | st.integers(1, 2000))
def test_a_plan_survives_pickle_and_json(units: list[Unit], num_shards: int, segment_nbytes: int | None) -> None:
    shards = plan.plan_shards(units, num_shards, segment_nbytes=segment_nbytes)
    again = [pickle.loads(pickle.dumps(shards)), copy.deepcopy(shards), plan.ShardPlan.from_json(shards.to_json())]
    for other in again:
        assert other == shards
        assert hash(other) == hash(shards)
        assert other.digest() == shards.digest()
        assert plan.first_difference(other.to_json(), shards.to_json()) is None
    for _, layout in shards.groups:
        assert pickle.loads(pickle.dumps(layout)) == layout == plan.ShardLayout.from_json(layout.to_json())


def encoded(layout: plan.ShardLayout) -> bytes:
    """The canonical encoding of a layout, written a second time from its description."""
    head = text(layout.dtype) + numbers(layout.trainable, layout.num_shards, layout.alignment, layout.padded_numel)
    entries = layout.entries()
    return head + numbers(len(entries)) + b"".join(text(name) + numbers(numel, at) for name, numel, at in entries)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def text(value: str) -> bytes:
    return numbers(len(value.encode())) + value.encode()


@given(units=unit_lists(), num_shards=st.integers(1, 9), segment_nbytes=st.none() | st.integers(1, 2000))
def test_digests_are_sha256_of_the_canonical_encoding(
    units: list[Unit], num_shards: int, segment_nbytes: int | None
) -> None:
    shards = plan.plan_shards(units, num_shards, segment_nbytes=segment_nbytes)
    body = text("shardcore.shard_plan.v1") + numbers(num_shards, shards.alignment, segment_nbytes or 0)
    body += numbers(len(units)) + b"".join(text(name) for name in shards.units)
    body += numbers(len(shards)) + b"".join(numbers(unit) + encoded(layout) for unit, layout in shards.groups)
    body += numbers(len(shards.reduce_order), *shards.reduce_order)
    assert shards.digest() == hashlib.sha256(body).hexdigest()
    for _, layout in shards.groups:
        assert layout.digest() == hashlib.sha256(text("shardcore.shard_layout.v1") + encoded(layout)).hexdigest()


def test_the_document_says_all_that_the_plan_says() -> None:
    shards = plan.plan_shards(model(2), num_shards=4)
    document = json.loads(shards.to_json())
    assert list(document) == ["format", "num_shards", "alignment", "segment_nbytes", "units", "reduce_order"]
    written = [
        (
            index,
            group["dtype"],
            group["trainable"],
            group["padded_numel"],
            [tuple(e.values()) for e in group["entries"]],
        )
        for index, unit in enumerate(document["units"])
        for group in unit["groups"]
    ]
    assert written == [
        (unit, layout.dtype, layout.trainable, layout.padded_numel, layout.entries()) for unit, layout in shards.groups
    ]
    assert document["reduce_order"] == shards.reduce_order


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (plan.plan_shards(model(), 8), "num_shards: 4 in the first, 8 in the second"),
        (plan.plan_shards(model(2), 4), 'unit 2 "layers.2": only in the first'),
        (
            plan.plan_shards(model(2) + model(3, numel=101)[2:], 4),
            'unit 2 "layers.2", group 0, entry 0 "layers.2.weight", numel: 100 in the first, 101 in the second',
        ),
        (
            plan.plan_shards([model()[0], ("other", model()[1][1]), model()[2]], 4),
            'unit 1, name: "layers.1" in the first, "other" in the second',
        ),
    ],
)
def test_the_first_difference_is_named(other: plan.ShardPlan, difference: str) -> None:
    assert plan.first_difference(plan.plan_shards(model(), 4).to_json(), other.to_json()) == difference


def test_long_plans_are_explained_in_few_lines() -> None:
    shards = plan.plan_shards(model(2000), num_shards=4)
    lines = shards.explain().splitlines()
    assert len(lines) == 43
    assert "... 5,960 more ..." in lines
    wide = plan.shard_layout([(f"p{index}", 5, "bf16", True) for index in range(2000)], 4)
    assert len(wide.explain().splitlines()) == 43


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([("a", [("w", 1, "bf16", True)]), ("b", [("w", 1, "bf16", True)])], '"w" is in unit "a" and in unit "b"'),
        ([("a", [("w", 1, "bf16", True), ("w", 1, "fp32", True)])], '"w" appears twice'),
        ([("a", [("w", 1, "complex128", True)])], "complex"),
    ],
)
def test_wrong_units_are_refused(units: list[Unit], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.plan_shards(units, 2)


@pytest.mark.parametrize("units", [[("a",)], [("a", 5)], ["ab"], 3])
def test_wrong_shapes_of_units_raise_a_type_error(units: object) -> None:
    with pytest.raises(TypeError):
        plan.plan_shards(units, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"format": "shardcore.shard_plan.v1"}'])
def test_broken_documents_are_refused(broken: str) -> None:
    with pytest.raises(PlanError, match="not a plan document"):
        plan.ShardPlan.from_json(broken)


@pytest.mark.parametrize("attribute", ["num_shards", "anything"])
def test_plans_are_frozen(attribute: str) -> None:
    shards = plan.plan_shards(model(1), 2)
    for frozen in (shards, shards.groups[0][1]):
        with pytest.raises(AttributeError):
            setattr(frozen, attribute, 1)


def test_ten_billion_elements_over_16384_ranks_take_no_time() -> None:
    """The bound only tells work per group from work per rank, which would take minutes; criterion measures the time."""
    units = [(f"u{u}", [(f"u{u}.p{p}", 1_000_000, "bf16", True) for p in range(10)]) for u in range(1000)]
    start = time.perf_counter()
    shards = plan.plan_shards(units, num_shards=16_384)
    held = sum(stop - begin for _, layout in shards.groups for _, begin, stop, _ in layout.ranges(77))
    seconds = time.perf_counter() - start
    assert held == 1000 * 640  # 10 million elements over 16,384 ranks, rounded up to 256 bytes
    assert seconds < 1.0
