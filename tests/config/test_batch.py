"""The batch triangle: every subset of what can be given, every way it can fail."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.config import BatchConfig, BatchSizes, load_config, solve_batch
from shardcore.errors import ConfigError, DropInConfigError

NAMES = {
    "train_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps",
}


def triangle(train: int | None = None, micro: int | None = None, steps: int | None = None) -> BatchConfig:
    return BatchConfig(train_batch_size=train, micro_batch_size=micro, accumulation_steps=steps)


def as_tuple(sizes: BatchSizes) -> tuple[int, int, int]:
    return sizes.train_batch_size, sizes.micro_batch_size, sizes.accumulation_steps


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (triangle(train=16), (16, 8, 1)),
        (triangle(micro=4), (8, 4, 1)),
        (triangle(micro=4, steps=2), (16, 4, 2)),
        (triangle(train=16, steps=2), (16, 4, 2)),
        (triangle(train=16, micro=4), (16, 4, 2)),
        (triangle(train=16, micro=4, steps=2), (16, 4, 2)),
    ],
)
def test_a1_every_subset_that_fits(numbers: BatchConfig, expected: tuple[int, int, int]) -> None:
    sizes = solve_batch(numbers, data_world=2)
    assert as_tuple(sizes) == expected
    assert sizes.data_world == 2


@pytest.mark.parametrize(
    "numbers",
    [
        triangle(train=10, micro=4),
        triangle(train=16, micro=4, steps=3),
        triangle(train=1),
        triangle(micro=0),
        triangle(train=-2, micro=1),
        triangle(train=16, micro=4, steps=0),
        triangle(train=10, steps=2),
        triangle(train=4, micro=8),
    ],
)
def test_a1_what_does_not_fit_is_refused_with_all_numbers(numbers: BatchConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(numbers, data_world=2)
    text = str(caught.value)
    assert "world=2" in text
    for field, name in NAMES.items():
        value = getattr(numbers, field)
        assert value is None or f"{name}={value}" in text


@pytest.mark.parametrize("numbers", [triangle(), triangle(steps=2)])
def test_a1_nothing_given(numbers: BatchConfig) -> None:
    with pytest.raises(ConfigError, match="neither train_batch_size nor train_micro_batch_size_per_gpu is given"):
        solve_batch(numbers, data_world=2)


small = st.one_of(st.none(), st.integers(-1, 64))


@given(train=small, micro=small, steps=small, world=st.integers(1, 8))
def test_a_solution_keeps_what_was_given_and_an_error_means_there_is_none(
    train: int | None, micro: int | None, steps: int | None, world: int
) -> None:
    """Brute force over the free numbers is the judge: the documented rule picks one of the fitting triangles."""
    try:
        sizes = solve_batch(triangle(train, micro, steps), world)
    except ConfigError:
        sizes = None
    free_steps = [1] if train is None or micro is None else range(1, 65)
    fitting = [
        (t, m, g)
        for g in ([steps] if steps is not None else free_steps)
        for m in ([micro] if micro is not None else range(1, 65))
        for t in [train if train is not None else m * g * world]
        if (train, micro) != (None, None) and min(t, m, g) >= 1 and t == m * g * world
    ]
    assert [as_tuple(sizes)] == fitting if sizes is not None else fitting == []


@given(micro=st.integers(1, 50), steps=st.integers(1, 20), world=st.integers(1, 64))
def test_every_pair_of_a_true_triangle_gives_the_third(micro: int, steps: int, world: int) -> None:
    full = {"train_batch_size": micro * steps * world, "micro_batch_size": micro, "accumulation_steps": steps}
    for pair in itertools.combinations(full.items(), 2):
        assert as_tuple(solve_batch(BatchConfig(**dict(pair)), world)) == tuple(full.values())


@pytest.mark.parametrize(
    ("numbers", "quantities", "remedy"),
    [
        (triangle(train=10, micro=4), ("10", "4", "world 2"), "train_batch_size"),
        (triangle(train=10, steps=4), ("10", "4", "world 2"), "train_batch_size"),
        (triangle(train=7), ("7", "world 2"), "train_batch_size"),
        (triangle(train=16, micro=4, steps=3), ("16", "4", "3", "24"), "train_batch_size"),
    ],
)
def test_u12_a_division_that_fails_names_both_sides_and_a_remedy(
    numbers: BatchConfig, quantities: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(numbers, data_world=2)
    text = str(caught.value)
    assert all(re.search(rf"\b{quantity}\b", text) for quantity in quantities)
    advised = re.search(rf"set {remedy} to (?:a multiple of \d+, such as )?(\d+)", text)
    assert advised is not None
    # The remedy is no empty phrase: following it works.
    repaired = triangle(int(advised.group(1)), numbers.micro_batch_size, numbers.accumulation_steps)
    assert solve_batch(repaired, data_world=2).train_batch_size == int(advised.group(1))


def test_a2_the_world_may_come_later() -> None:
    source = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    config = load_config(source)
    assert config.batch_sizes is None
    assert as_tuple(config.resolve_batch(2)) == (16, 8, 1)
    with pytest.raises(ConfigError, match="world=4"):
        config.resolve_batch(4)


def test_a2_what_is_wrong_in_any_world_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu is 0"):
        load_config({"train_micro_batch_size_per_gpu": 0})
    with pytest.raises(ConfigError, match="neither"):
        load_config({})


def test_a13_two_counts_that_differ_are_refused_with_both_and_their_sources() -> None:
    source = {"train_batch_size": 16, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=r"config says 4, but the argument of the call says 1") as caught:
        load_config(source, data_world=2, accumulation_argument=1)
    assert "has 1 problem" in str(caught.value)


@pytest.mark.parametrize("in_file", [{"gradient_accumulation_steps": 4}, {}, {"gradient_accumulation_steps": "auto"}])
def test_a13_equal_or_single_counts_are_accepted(in_file: dict[str, Any]) -> None:
    config = load_config({"train_batch_size": 16, **in_file}, data_world=2, accumulation_argument=4)
    assert config.batch_sizes is not None
    assert config.batch_sizes.accumulation_steps == 4


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_errors_are_assertions_too_in_drop_in_mode_only(drop_in: bool, deferred: bool) -> None:
    source = {"train_batch_size": 7}
    with pytest.raises(ConfigError) as caught:
        load_config(source, data_world=None if deferred else 2, drop_in=drop_in).resolve_batch(2)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DropInConfigError) is drop_in
    assert isinstance(caught.value, AssertionError) is drop_in


def test_data_parallel_size_must_be_the_jobs() -> None:
    source = {"train_batch_size": 16, "data_parallel_size": 4}
    assert load_config(source, data_world=4).batch_sizes is not None
    with pytest.raises(ConfigError, match=r"world=2: data_parallel_size is 4, but the job has 2 data-parallel ranks"):
        load_config(source, data_world=2)


def test_a_world_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_world must be at least 1, got 0"):
        solve_batch(triangle(train=4), 0)
