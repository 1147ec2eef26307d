"""Unknown keys, nearest names, and "auto"."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.loading import BATCH, load, nested, problems
from shardcore.config import TABLE, edit_distance, load_config, nearest
from shardcore.errors import ConfigError


@pytest.mark.parametrize(
    ("source", "path", "meant"),
    [
        ({"gradient_acumulation_steps": 4}, "gradient_acumulation_steps", "gradient_accumulation_steps"),
        ({"zero_optimization": {"stag": 1}}, "zero_optimization.stag", "zero_optimization.stage"),
        ({"fp16": {"inital_scale_power": 8}}, "fp16.inital_scale_power", "fp16.initial_scale_power"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_decya": 0.1}}},
            "optimizer.params.weight_decya",
            "optimizer.params.weight_decay",
        ),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "activation_checkpointing.partition_activation",
            "activation_checkpointing.partition_activations",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_num_steps",
        ),
        ({"FP16": {"enabled": True}}, "FP16", "fp16"),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
            "optimizer.params.learning_rate",
            "optimizer.params.lr",
        ),
    ],
)
def test_a3_a_misspelt_key_is_an_error_with_the_nearest_name(source: dict[str, Any], path: str, meant: str) -> None:
    assert problems(source) == [f'{path}: unknown key; did you mean "{meant}"?']


def test_a3_a_key_like_no_other_lists_the_known_ones() -> None:
    (problem,) = problems({"data_types": {"banana": 1}})
    assert problem == "data_types.banana: unknown key; known here: buffer_dtype, grad_accum_dtype, param_dtype"


def test_a3_the_escape_passes_at_every_level_and_is_noted_once() -> None:
    config = load(**{"x-a": 1, "zero_optimization": {"x-b": {"stag": 1}}, "optimizer": SGD | {"x-c": 1}})
    assert [note for note in config.notes if "x-" in note] == [
        "your own keys, not read: x-a, zero_optimization.x-b, optimizer.x-c"
    ]
    with_parameter = load(optimizer={"type": "SGD", "params": {"lr": 0.1, "x-d": 1}})
    assert with_parameter.optimizer is not None
    assert with_parameter.optimizer.params == {"lr": 0.1}


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def test_a_far_off_top_level_key_is_noted_not_refused() -> None:
    config = load(my_experiment="seven", stage=3)
    assert "my_experiment: unknown top-level key, not read" in config.notes
    assert "stage: unknown top-level key, not read (did you mean zero_optimization.stage?)" in config.notes


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [
        ("stag", "stage", 1),
        ("weight_decya", "weight_decay", 1),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("A", "a", 0),
    ],
)
def test_edit_distance(left: str, right: str, distance: int) -> None:
    assert edit_distance(left, right) == edit_distance(right, left) == distance


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_bounded_by_the_lengths(left: str, right: str) -> None:
    distance = edit_distance(left, right)
    assert abs(len(left) - len(right)) <= distance <= max(len(left), len(right))
    assert (distance == 0) == (left == right)


def test_the_nearest_name_is_the_same_for_every_order() -> None:
    assert nearest("fpp", ["fp8", "fpa"]) == nearest("fpp", ["fpa", "fp8"]) == "fp8"
    assert nearest("zzzzzz", ["fp16"]) is None


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        ("zero_optimization.reduce_bucket_size", "500000000"),
        ("zero_optimization.stage", "0"),
        ("fp16.enabled", "false"),
        ("bf16.enabled", "false"),
        ("fp16.initial_scale_power", "16"),
    ],
)
def test_a4_auto_in_a_section_is_the_default_and_is_noted_once(path: str, resolved: str) -> None:
    config = load(**nested(path, "auto"))
    assert [note for note in config.notes if path in note] == [f'{path}: "auto" stands for the default, {resolved}']
    assert dataclasses.replace(config, notes=()) == load()


@pytest.mark.parametrize(
    "path", ["train_batch_size", "gradient_clipping", "steps_per_print", "communication_data_type"]
)
def test_a4_auto_at_the_top_level_needs_somebody_to_supply_it(path: str) -> None:
    (problem,) = problems({path: "auto"})
    assert problem.startswith(f'{path} is "auto" and nothing supplies it')


def test_a4_auto_for_a_micro_batch_says_so_and_nothing_else() -> None:
    (problem,) = problems({"train_micro_batch_size_per_gpu": "auto"})
    assert problem.startswith('train_micro_batch_size_per_gpu is "auto"')


def test_a4_auto_parameters_fall_back_to_the_defaults() -> None:
    config = load(
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    )
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params == {"weight_decay": 0.01}
    assert config.scheduler.params == {}
    text = "\n".join(config.notes)
    assert 'optimizer.params.lr: "auto" stands for the default, 0.001' in text
    assert 'scheduler.params.warmup_num_steps: "auto" stands for the default, 1000' in text


def test_a4_auto_without_a_default_is_refused() -> None:
    (problem,) = problems({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})
    assert problem.startswith('scheduler.params.total_num_steps is "auto" and nothing supplies it')
    (problem,) = problems({"optimizer": {"type": "auto"}})
    assert problem.startswith('optimizer.type is "auto" and nothing supplies it')


def test_a4_auto_for_a_class_known_only_to_torch() -> None:
    config = load(scheduler={"type": "StepLR", "params": {"step_size": 3, "gamma": "auto"}})
    assert config.scheduler is not None
    assert config.scheduler.params == {"step_size": 3}
    assert 'scheduler.params.gamma: "auto" stands for the default of the class' in config.notes


def test_a4_auto_never_ends_in_a_type_error() -> None:
    for path in TABLE:
        try:
            load_config({**BATCH, **nested(path, "auto")}, data_world=2)
        except ConfigError as error:
            assert path in str(error)  # noqa: PT017  either outcome is right, if it names the key
