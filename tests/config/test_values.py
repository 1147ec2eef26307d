"""Values: kinds, ranges, and how they combine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from config.loading import load, nested, problems
from shardcore.config import TABLE, Field, Ignored, Unsupported


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "path",
    [
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.replicate_size",
        "aio.block_size",
        "aio.queue_depth",
        "checkpoint.writer.io_buffer_size",
        "sequence_parallel_size",
        "data_parallel_size",
    ],
)
def test_a6_a_size_below_one_is_refused_when_read(path: str, value: int) -> None:
    assert problems(nested(path, value)) == [f"{path}: expected an integer >= 1, got {value}"]


@pytest.mark.parametrize(
    "path",
    [
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
    ],
)
def test_a6_a_limit_may_be_zero_which_turns_it_off_but_not_negative(path: str) -> None:
    assert not load(**nested(path, 0)).ignored
    assert problems(nested(path, -1)) == [f"{path}: expected an integer >= 0, got -1"]


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        ("mics_shard_size", 2, 1),
        ("replicate_size", 2, 1),
        ("zero_quantized_gradients", True, 1),
        ("zero_quantized_weights", True, 3),
        ("zero_quantized_nontrainable_weights", True, 3),
        ("zero_hpz_partition_size", 2, 3),
    ],
)
def test_what_travels_otherwise_needs_a_stage_that_has_a_use_for_it(key: str, value: Any, least: int) -> None:
    load(zero_optimization={"stage": least, key: value})
    (problem,) = problems({"zero_optimization": {"stage": least - 1, key: value}})
    assert problem.startswith(f"zero_optimization.{key}: expected stage {least} or above, got stage {least - 1}")


def test_copies_are_counted_once() -> None:
    (problem,) = problems({"zero_optimization": {"stage": 3, "mics_shard_size": 2, "replicate_size": 2}})
    assert "give one of them" in problem


@pytest.mark.parametrize(
    ("beside", "key"),
    [
        ({"pipeline": {"stages": 2}}, "pipeline.stages"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": True}},
            "zero_optimization.mics_hierarchical_params_gather",
        ),
    ],
)
def test_what_sequences_cannot_be_shared_with_yet(beside: dict[str, Any], key: str) -> None:
    assert problems({"sequence_parallel_size": 2, **beside}) == [
        f"sequence_parallel_size: 2 together with {key} is not available yet; take one of them out"
    ]
    assert load(**beside, sequence_parallel_size=1).sequence.num_ranks == 1


def test_experts_are_split_as_everything_is() -> None:
    section = {"enabled": True, "autoep_size": 2, "expert_tensor_parallel_size": 4}
    (problem,) = problems({"expert_parallel": section, "tensor_parallel": {"tp_size": 2}})
    assert problem.startswith("expert_parallel.expert_tensor_parallel_size: expected 1 or 2, the number of tensor")
    assert load(expert_parallel=section, tensor_parallel={"tp_size": 4}).experts.num_ranks == 2
    off = load(expert_parallel={"autoep_size": 2})
    assert off.experts.num_ranks == 1
    assert "expert_parallel.autoep_size: takes effect with expert_parallel.enabled" in off.notes


def test_a6_a_bucket_of_one_element_is_fine() -> None:
    assert load(zero_optimization={"reduce_bucket_size": 1}).zero.reduce_bucket_size == 1


@pytest.mark.parametrize("path", list(TABLE))
def test_every_key_checks_its_value_and_names_itself(path: str) -> None:
    """An object that no key accepts: honoured, ignored and refused keys alike must say so."""
    entry = TABLE[path]
    if isinstance(entry, Ignored | Field | Unsupported) and entry.kind.expected in ("any value", "an object"):
        value: Any = "text" if entry.kind.expected == "an object" else None
    else:
        value = {"unexpected": ["value"]}
    if value is None:
        load(**nested(path, 3))
        return
    assert any(path in problem for problem in problems(nested(path, value)))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("train_batch_size", "16", 'expected an integer, got "16" (a string)'),
        ("train_batch_size", 2.5, "expected an integer, got 2.5"),
        ("train_batch_size", True, "expected an integer, got true"),
        ("gradient_clipping", -1, "expected a number >= 0, got -1"),
        ("gradient_clipping", math.nan, "expected a number >= 0, got NaN"),
        ("gradient_predivide_factor", 0, "expected a number > 0, got 0"),
        ("prescale_gradients", 1, "expected true or false, got 1"),
        ("fp16", True, "expected an object, got true"),
        ("fp16.loss_scale", True, "expected a number >= 0, got true"),
        ("fp16.loss_scale", math.inf, "expected a number >= 0, got Infinity"),
        ("fp16.loss_scale_window", 0, "expected an integer >= 1, got 0"),
        ("fp16.min_loss_scale", 0, "expected a number > 0, got 0"),
        ("fp16.initial_scale_power", 127, "expected an integer >= 0 and <= 126, got 127"),
        ("zero_optimization.stage", 4, "expected an integer >= 0 and <= 3, got 4"),
        ("zero_optimization", 2, "expected an object, got 2"),
        ("communication_data_type", "int8", 'expected one of "fp32", "fp16", "bf16", got "int8" (a string)'),
        ("optimizer.params", [1], "expected an object, got [1]"),
        ("steps_per_print", 0, "expected a number of steps >= 1 (leave it out for never), got 0"),
        ("log_level", "loud", 'expected one of "debug", "info", "warning", "error", "critical", got "loud" (a string)'),
    ],
)
def test_a_wrong_value_is_named_with_expected_and_got(path: str, value: Any, expected: str) -> None:
    assert f"{path}: {expected}" in problems(nested(path, value))


def test_honoured_values_arrive() -> None:
    config = load(
        gradient_accumulation_steps=3.0,
        steps_per_print=10,
        gradient_clipping=0.5,
        gradient_allreduce_op="mean",
        communication_data_type="bfloat16",
        dataloader_drop_last=True,
        wall_clock_breakdown=True,
        dump_state=True,
        log_level="WARNING",
        managed_gradient_accumulation=False,
        data_parallel_size=2,
        data_types={"param_dtype": "bf16"},
        bf16={"enabled": True, "check_grad_overflow": False},
        zero_optimization={"stage": 2, "reduce_bucket_size": 5e6},
    )
    assert config.batch_sizes is not None
    assert (config.batch_sizes.train_batch_size, config.batch_sizes.accumulation_steps) == (12, 3)
    assert (config.batch.managed, config.batch.data_parallel_size) == (False, 2)
    gradients = config.gradients
    assert (gradients.clipping, gradients.communication_dtype) == (0.5, "bf16")
    assert (config.zero.stage, config.zero.reduce_bucket_size) == (2, 5_000_000)
    assert isinstance(config.zero.reduce_bucket_size, int)
    assert config.data.drop_last
    logging = config.logging
    assert (logging.steps_per_print, logging.wall_clock_breakdown, logging.dump_state) == (10, True, True)
    assert logging.level == "warning"
    assert (config.param_dtype, config.bf16.check_grad_overflow) == ("bf16", False)


def test_null_means_not_given() -> None:
    nothing = {path.split(".")[0]: None for path in TABLE if path != "train_micro_batch_size_per_gpu"}
    assert load(**nothing) == load()
    assert load(zero_optimization={"stage": None, "offload_param": None, "zenflow": None}) == load()


def test_infinite_steps_per_print_is_never() -> None:
    assert load(steps_per_print=math.inf).logging.steps_per_print is None


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("prescale", [False, True])
def test_a14_prescale_and_predivide_are_accepted_and_change_nothing(prescale: bool, factor: int) -> None:
    for stage in range(3):
        config = load(prescale_gradients=prescale, gradient_predivide_factor=factor, zero_optimization={"stage": stage})
        assert {key.path for key in config.ignored} >= {"prescale_gradients", "gradient_predivide_factor"}
        assert config.gradients == load().gradients


@pytest.mark.parametrize("factor", [0, -2, "two"])
def test_a14_a_factor_that_cannot_divide_is_refused(factor: Any) -> None:
    (problem,) = problems({"gradient_predivide_factor": factor})
    assert problem.startswith("gradient_predivide_factor: expected a number > 0")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"loss_scale_window": 500},
        {"min_loss_scale": 2},
        {
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 1,
            "min_loss_scale": 2,
            "consecutive_hysteresis": True,
        },
    ],
)
def test_a10_the_initial_scale_is_the_same_whatever_else_is_given(keys: dict[str, Any]) -> None:
    fp16 = load(fp16={"enabled": True, **keys}).fp16
    assert fp16.dynamic
    assert fp16.initial_scale == 65536.0


def test_a11_a_static_scale_is_kept() -> None:
    fp16 = load(fp16={"enabled": True, "loss_scale": 128, "initial_scale_power": 4}).fp16
    assert not fp16.dynamic
    assert fp16.initial_scale == 128.0


def test_a12_both_precisions_are_refused_naming_both() -> None:
    assert problems({"fp16": {"enabled": True}, "bf16": {"enabled": True}}) == [
        "fp16.enabled and bf16.enabled are both true; set one of them to false"
    ]


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
@pytest.mark.parametrize(
    "key", ["loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"]
)
def test_a12_a_loss_scale_for_bfloat16_is_fp16_only(section: str, key: str) -> None:
    (problem,) = problems({section: {"enabled": True, key: 1}})
    assert problem.startswith(f"{section}.{key}: fp16 only")


def test_the_two_names_of_bfloat16_must_agree() -> None:
    assert load(bfloat16={"enabled": True}).param_dtype == "bf16"
    assert load(bfloat16={"enabled": True}, bf16={"enabled": True}).bf16.enabled
    (problem,) = problems({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}})
    assert problem == "bfloat16.enabled and bf16.enabled are two names of one setting and differ; keep one of them"


def test_a_declared_dtype_must_be_the_one_in_force() -> None:
    assert load(fp16={"enabled": True}, data_types={"param_dtype": "float16"}).param_dtype == "fp16"
    (problem,) = problems({"data_types": {"param_dtype": "bf16"}})
    assert problem.startswith('data_types.param_dtype: expected "fp32"')


def test_the_smallest_scale_must_not_exceed_the_first() -> None:
    (problem,) = problems({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}})
    assert problem.startswith("fp16.min_loss_scale: expected at most 2 ** fp16.initial_scale_power = 4, got 8")


@pytest.mark.parametrize(
    ("keys", "native", "drop_in"),
    [({}, None, 1.0), ({"gradient_clipping": 0}, None, None), ({"gradient_clipping": 0.3}, 0.3, 0.3)],
)
def test_clipping_defaults_to_one_in_drop_in_mode_and_says_so(
    keys: dict[str, Any], native: float | None, drop_in: float | None
) -> None:
    assert load(**keys).gradients.clipping == native
    config = load(True, **keys)
    assert config.gradients.clipping == drop_in
    assert any("gradient_clipping: not given" in note for note in config.notes) == (not keys)
