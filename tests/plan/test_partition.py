"""Layers into stages: the smallest bottleneck of all partitions, nothing lost, nothing empty."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore import plan
from shardcore.errors import PlanError

WEIGHTS = st.lists(st.integers(0, 4) | st.sampled_from([0.5, 1e-9, 10**6, 10**12]), min_size=1, max_size=9)


def all_boundaries(num_layers: int, num_parts: int) -> list[list[int]]:
    return [[0, *cuts, num_layers] for cuts in combinations(range(1, num_layers), num_parts - 1)]


def bottleneck(weights: list[float], boundaries: list[int]) -> float:
    return max(sum(weights[start:stop]) for start, stop in pairwise(boundaries))


@given(weights=WEIGHTS, data=st.data())
def test_no_partition_has_a_smaller_bottleneck(weights: list[float], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(weights)))
    found = plan.partition_layers(weights, num_parts)
    every = all_boundaries(len(weights), num_parts)
    assert found in every
    assert bottleneck(weights, found) == min(bottleneck(weights, other) for other in every)


@given(weights=WEIGHTS, data=st.data())
def test_ties_go_to_the_fewest_bytes(weights: list[float], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(weights)))
    cut_nbytes = data.draw(st.lists(st.integers(0, 3), min_size=len(weights) - 1, max_size=len(weights) - 1))

    def nbytes(boundaries: list[int]) -> int:
        return sum(cut_nbytes[cut - 1] for cut in boundaries[1:-1])

    found = plan.partition_layers(weights, num_parts, cut_nbytes=cut_nbytes)
    best = bottleneck(weights, found)
    every = all_boundaries(len(weights), num_parts)
    assert best == min(bottleneck(weights, other) for other in every)
    assert nbytes(found) == min(nbytes(other) for other in every if bottleneck(weights, other) == best)


@pytest.mark.parametrize("num_layers", range(1, 10))
@pytest.mark.parametrize("num_parts", range(1, 5))
def test_e13_no_layer_is_lost(num_layers: int, num_parts: int) -> None:
    def partitions() -> list[list[int]]:
        names = ["Block"] * num_layers
        return [
            plan.partition_layers([1] * num_layers, num_parts),
            plan.partition_uniform(num_layers, num_parts),
            plan.partition_by_class(names, "block", num_parts),
        ]

    if num_layers < num_parts:
        with pytest.raises(PlanError, match=f"{num_layers} layers cannot fill {num_parts} parts"):
            partitions()
        return
    for boundaries in partitions():
        assert plan.check_boundaries(boundaries, num_layers) == boundaries
        assert len(boundaries) == num_parts + 1
        assert max(stop - start for start, stop in pairwise(boundaries)) == -(-num_layers // num_parts)


def test_the_bottleneck_comes_before_the_difference() -> None:
    assert plan.partition_layers([1, 6, 3, 3], 3) == [0, 1, 2, 4]  # parts of 7, 3, 3 would differ less


def test_classes_are_matched_as_people_write_them() -> None:
    names = ["Embedding", "GPTBlock", "GPTBlock", "GPTBlock", "GPTBlock", "LayerNorm", "Linear"]
    assert plan.partition_by_class(names, "block", 2) == [0, 3, 7]
    assert plan.partition_by_class(names, "^GPT.*k$", 4) == [0, 2, 3, 4, 7]
    assert plan.partition_by_class(iter(names), "embedding|linear", 2, cut_nbytes=[0, 9, 9, 9, 9, 9]) == [0, 1, 7]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plan.partition_layers([1, -2], 1), "layer 1: its weight is -2: expected a finite number"),
        (lambda: plan.partition_layers([float("nan")], 1), "layer 0: its weight is NaN"),
        (lambda: plan.partition_layers([1], 0), "num_parts is 0: expected at least 1"),
        (lambda: plan.partition_layers([1], -3), "num_parts is -3: expected at least 1"),
        (lambda: plan.partition_layers([], 1), "0 layers cannot fill 1 parts"),
        (lambda: plan.partition_layers([1, 1], 1, cut_nbytes=[]), "cut_nbytes has 0 entries"),
        (lambda: plan.partition_marked([False], 1), "none of the 1 layers is marked"),
        (
            lambda: plan.partition_by_class(["A", "B", "A"], "c", 1),
            "no layer: expected one of A, B",
        ),
        (lambda: plan.partition_by_class("Block", "b", 2), "class_names is the string 'Block': expected a list"),
        (lambda: plan.partition_by_class(["A"], "(", 1), "is no regular expression"),
        (lambda: plan.check_boundaries([0, 3, 3, 5], 5), "part 1 is empty"),
        (lambda: plan.check_boundaries([0, 4], 5), "must end with the last layer, at 5"),
        (lambda: plan.from_megatron_layout("Et|tx"), "character 5: unexpected 'x'"),
        (lambda: plan.from_megatron_layout("Et||L"), "stage 1 has no layer"),
        (lambda: plan.to_megatron_layout(["embedding", "attention"], [0, 2]), 'unknown layer "attention"'),
    ],
)
def test_bad_input_is_named(call, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert text in str(caught.value)


def test_megatrons_example_and_back() -> None:
    layers, boundaries = plan.from_megatron_layout("Et*3|(tt|)*29,m|L")
    assert (len(layers), layers.count("decoder"), boundaries[:3], len(boundaries)) == (64, 61, [0, 4, 6], 33)
    assert plan.to_megatron_layout(layers, boundaries) == "Et*3|(tt|)*29m|L"


def test_a_partition_can_be_given_to_megatron() -> None:
    layers = ["embedding", *["decoder"] * 12, "loss"]
    boundaries = plan.partition_layers([2, *[1] * 12, 3], 4)
    assert plan.to_megatron_layout(layers, boundaries) == "Ett|(t*4|)*2ttL"
