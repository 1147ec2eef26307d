"""Flat layouts as Python sees them: tiling, alignment, the numbers of a small example, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError

ITEMSIZES = {"bool": 1, "int8": 1, "fp8_e4m3fn": 1, "int16": 2, "fp16": 2, "bf16": 2, "fp32": 4, "int64": 8, "fp64": 8}

NUMELS = st.one_of(st.sampled_from([0, 1, 2, 7, 8, 127, 128, 129, 1021]), st.integers(0, 3000))


def params(*numels: int, dtype: str = "bf16", trainable: bool = True) -> list[tuple[str, int, str, bool]]:
    return [(f"p{index}", numel, dtype, trainable) for index, numel in enumerate(numels)]


@given(
    numels=st.lists(NUMELS, max_size=12),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
    num_shards=st.integers(1, 33),
    alignment=st.sampled_from([16, 64, 256, 1024]),
)
def test_shards_tile_every_element_once(numels: list[int], dtype: str, num_shards: int, alignment: int) -> None:
    layout = plan.shard_layout(params(*numels, dtype=dtype), num_shards, alignment=alignment)
    expected = {(f"p{index}", element) for index, numel in enumerate(numels) for element in range(numel)}
    seen: dict[int, tuple[str, int]] = {}
    for rank in range(num_shards):
        for name, start, stop, shard_offset in layout.ranges(rank):
            assert 0 <= shard_offset < shard_offset + stop - start <= layout.shard_numel
            first = rank * layout.shard_numel + shard_offset
            for element in range(start, stop):
                place = first + element - start
                assert place not in seen
                assert place == layout.offset(name) + element
                seen[place] = (name, element)
    assert len(seen) == len(expected)
    assert set(seen.values()) == expected
    padding = {place for start, stop in layout.gaps() for place in range(start, stop)}
    assert padding == set(range(layout.padded_numel)) - set(seen)


@given(
    numels=st.lists(NUMELS, min_size=1, max_size=12),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
    num_shards=st.integers(1, 33),
    alignment=st.sampled_from([16, 64, 256, 1024]),
)
def test_everything_is_aligned(numels: list[int], dtype: str, num_shards: int, alignment: int) -> None:
    layout = plan.shard_layout(params(*numels, dtype=dtype), num_shards, alignment=alignment)
    assert layout.itemsize == ITEMSIZES[dtype]
    assert layout.padded_numel == num_shards * layout.shard_numel
    assert layout.shard_numel * layout.itemsize % alignment == 0
    assert all(offset * layout.itemsize % 16 == 0 for _, _, offset in layout.entries())
    assert [(name, numel) for name, numel, _ in layout.entries()] == [(p[0], p[1]) for p in params(*numels)]
    assert layout.numel == sum(numels)


def test_the_numbers_of_a_small_layout() -> None:
    layout = plan.shard_layout([("weight", 1000, "bf16", True), ("bias", 10, "bf16", True)], num_shards=4)
    assert (layout.padded_numel, layout.shard_numel, layout.num_shards) == (1024, 256, 4)
    assert (layout.dtype, layout.trainable, layout.names) == ("bf16", True, ["weight", "bias"])
    assert (layout.alignment, layout.itemsize, layout.numel, len(layout)) == (256, 2, 1010, 2)
    assert layout.entries() == [("weight", 1000, 0), ("bias", 10, 1000)]
    assert layout.ranges(0) == [("weight", 0, 256, 0)]
    assert layout.ranges(3) == [("weight", 768, 1000, 0), ("bias", 0, 10, 232)]
    assert layout.gaps() == [(1010, 1024)]
    assert "2 parameters" in repr(layout)


def test_lists_and_any_iterable_serve_as_well_as_tuples() -> None:
    expected = plan.shard_layout([("weight", 1000, "bf16", True)], 4)
    assert plan.shard_layout([["weight", 1000, "bf16", True]], 4) == expected  # type: ignore[list-item]
    assert plan.shard_layout(iter([("weight", 1000, "bf16", True)]), 4) == expected
    assert plan.shard_layout([("weight", 1001, "bf16", True)], 4) != expected


def test_an_empty_layout_is_fine() -> None:
    layout = plan.shard_layout([], num_shards=3)
    assert (layout.padded_numel, layout.names, layout.gaps(), layout.ranges(2)) == (0, [], [], [])


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("fp16", "fp16"),
        ("half", "fp16"),
        ("float32", "fp32"),
        ("torch.float32", "fp32"),
        ("torch.float64", "fp64"),
        ("torch.float8_e4m3fn", "fp8_e4m3fn"),
        ("torch.float8_e5m2", "fp8_e5m2"),
        ("torch.uint8", "uint8"),
        ("torch.int64", "int64"),
        ("torch.bool", "bool"),
    ],
)
def test_dtypes_have_one_canonical_name(spelling: str, canonical: str) -> None:
    assert plan.shard_layout([("w", 4, spelling, False)], 1).dtype == canonical


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan.shard_layout([*params(4), ("q", 4, "fp32", True)], 2), "plan.groups"),
        (lambda: plan.shard_layout([*params(4), ("q", 4, "bf16", False)], 2), '"q" is frozen bf16'),
        (lambda: plan.shard_layout(params(4) * 2, 2), '"p0" appears twice'),
        (lambda: plan.shard_layout(params(4, dtype="torch.complex64"), 2), "complex parameters are not supported"),
        (lambda: plan.shard_layout(params(4, dtype="fp23"), 2), 'parameter "p0": unknown dtype "fp23"'),
        (lambda: plan.shard_layout(params(-4), 2), 'parameter "p0": numel is -4'),
        (lambda: plan.shard_layout(params(1 << 64), 2), 'parameter "p0": numel is 18446744073709551616'),
        (lambda: plan.shard_layout(params(1 << 62), 2), "too large"),
        (lambda: plan.shard_layout(params(4), 0), "num_shards is 0: expected at least 1"),
        (lambda: plan.shard_layout(params(4), -1), "num_shards is -1: expected at least 1"),
        (lambda: plan.shard_layout(params(4), 2, alignment=8), "alignment is 8"),
        (lambda: plan.shard_layout(params(4), 2, alignment=48), "alignment is 48"),
        (lambda: plan.shard_layout(params(4), 2, alignment=-16), "alignment is -16"),
        (lambda: plan.shard_layout(params(4), 2).ranges(2), "rank 2 is out of range"),
        (lambda: plan.shard_layout(params(4), 2).ranges(-1), "rank -1 is out of range"),
        (lambda: plan.shard_layout(params(4), 2).offset("q"), 'no parameter named "q"'),
    ],
)
def test_wrong_values_raise_a_plan_error_that_says_which(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        [("w", 4, "bf16")],
        [("w", 4, "bf16", True, None)],
        ["text"],
        [("w", 1.5, "bf16", True)],
        [(4, 4, "bf16", True)],
        7,
    ],
)
def test_wrong_shapes_of_input_raise_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        plan.shard_layout(wrong, 2)  # type: ignore[arg-type]
