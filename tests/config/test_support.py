"""What is refused, removed, ignored; the optimizer and the schedule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from config.loading import load, nested, problems
from shardcore.config import TABLE, Removed, Unsupported

REMOVED = [path for path, entry in TABLE.items() if isinstance(entry, Removed)]


def test_a15_removed_blocks_are_refused_all_at_once() -> None:
    source: dict[str, Any] = {
        path: True if path in ("sparse_gradients", "graph_harvesting") else {} for path in REMOVED
    }
    for path in [path for path in REMOVED if "." in path]:
        section, name = path.split(".")
        source.setdefault(section, {})[name] = source.pop(path)
    found = problems(source)
    assert len(found) == len(REMOVED)
    for path in REMOVED:
        assert any(f"not supported by this library: {path}; remove it" in problem for problem in found)


@pytest.mark.parametrize("name", ["OneBitAdam", "onebitlamb", "ZeroOneAdam", "Lamb", "MuAdam"])
def test_a15_removed_optimizers(name: str) -> None:
    (problem,) = problems({"optimizer": {"type": name, "params": {"lr": 0.1, "freeze_step": 3}}})
    assert problem.startswith(f'not supported by this library: optimizer.type "{name}"; remove it')


@pytest.mark.parametrize("path", [path for path in REMOVED if path != "zero_optimization.zenflow"])
def test_a15_what_is_switched_off_asks_for_nothing(path: str) -> None:
    off: Any = False if path in ("sparse_gradients", "graph_harvesting") or "." in path else {"enabled": False}
    assert load(**nested(path, off)) == load()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.offload_optimizer.super_offload", True),
        ("zero_optimization.cpu_offload", True),
        ("zero_optimization.ignore_unused_parameters", False),
        ("tensor_parallel.partition_config", {"use_default_specs": False}),
        ("torch_autocast.enabled", True),
        ("tensorboard.enabled", True),
        ("comms_logger.enabled", True),
        ("flops_profiler.enabled", True),
        ("autotuning.enabled", True),
        ("checkpoint.use_node_local_storage", True),
        ("gradient_allreduce_op", "sum"),
        ("data_types.buffer_dtype", "bf16"),
        ("fp16.fp16_master_weights_and_grads", True),
        ("bf16.bf16_optimizer_states", True),
    ],
)
def test_what_would_change_training_and_is_not_there_is_refused(path: str, value: Any) -> None:
    (problem,) = problems(nested(path, value))
    assert problem.startswith(f"{path}: {json.dumps(value)} is not supported (")
    assert "); use " in problem


@pytest.mark.parametrize("path", [path for path, entry in TABLE.items() if isinstance(entry, Unsupported)])
def test_neutral_values_are_accepted_and_change_nothing(path: str) -> None:
    entry = TABLE[path]
    assert isinstance(entry, Unsupported)
    for value in (*entry.neutral, "auto"):
        assert load(**nested(path, value)) == load()


def test_ignored_keys_are_listed_with_reasons_and_noted_in_one_line() -> None:
    config = load(zero_optimization={"stage": 3, "allgather_bucket_size": 1e9, "contiguous_gradients": True})
    assert [(key.path, key.shown) for key in config.ignored] == [
        ("zero_optimization.allgather_bucket_size", "1000000000.0"),
        ("zero_optimization.contiguous_gradients", "true"),
    ]
    assert "flat buffer" in config.ignored[0].reason
    (note,) = [note for note in config.notes if "without effect" in note]
    assert "allgather_bucket_size, zero_optimization.contiguous_gradients" in note


def test_all_problems_come_at_once() -> None:
    found = problems(
        {
            "train_batch_size": 7,
            "gradient_acumulation_steps": 4,
            "gradient_clipping": "auto",
            "fp16": {"enabled": True, "loss_scale": -1},
            "bf16": {"enabled": True},
            "zero_optimization": {"stag": 1, "offload_param": {"device": "cpu"}},
            "elasticity": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "max_grad_norm": 1.0}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}},
        }
    )
    for part in (
        "train_batch_size=7, train_micro_batch_size_per_gpu=2, world=2",
        "gradient_acumulation_steps",
        'gradient_clipping is "auto"',
        "fp16.loss_scale",
        "fp16.enabled and bf16.enabled",
        "zero_optimization.stag:",
        'zero_optimization.offload_param.device: "cpu" needs zero_optimization.stage 3, got 0',
        "elasticity",
        "optimizer.params.lr",
        "optimizer.params.max_grad_norm: give it at the top level, as gradient_clipping",
        "scheduler.params.total_num_steps",
    ):
        assert sum(part in problem for problem in found) == 1, part
    assert len(found) == 11


def optimizer_of(name: str, drop_in: bool = False, **params: Any) -> tuple[str, dict[str, Any]]:
    optimizer = load(drop_in, optimizer={"type": name, "params": params}).optimizer
    assert optimizer is not None
    return optimizer.type, dict(optimizer.params)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("Adam", {}, ("AdamW", {"weight_decay": 0.0})),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, ("Adam", {"weight_decay": 0.1})),
        ("ADAMW", {"weight_decay": 0.1, "adam_w_mode": False}, ("AdamW", {"weight_decay": 0.1})),
        ("AdamW", {"lr": 1, "betas": [0.8, 0.9]}, ("AdamW", {"lr": 1.0, "betas": (0.8, 0.9), "weight_decay": 0.01})),
        ("adagrad", {"lr": 0.1}, ("Adagrad", {"lr": 0.1})),
        ("sgd", {"momentum": 0.9}, ("SGD", {"momentum": 0.9})),
        ("RMSprop", {"alpha": 0.9, "eps": None}, ("RMSprop", {"alpha": 0.9})),
    ],
)
def test_optimizers_come_in_torchs_names(name: str, params: dict[str, Any], expected: tuple[str, Any]) -> None:
    assert optimizer_of(name, **params) == expected


def test_adamw_decays_nothing_in_drop_in_mode_unless_told_to() -> None:
    assert optimizer_of("AdamW", drop_in=True) == ("AdamW", {"weight_decay": 0.0})
    assert optimizer_of("AdamW", drop_in=True, torch_adam=True) == ("AdamW", {"weight_decay": 0.01})
    assert optimizer_of("AdamW", drop_in=True, weight_decay=0.3) == ("AdamW", {"weight_decay": 0.3})
    config = load(True, optimizer={"type": "AdamW"})
    assert any(note.startswith("optimizer.params.weight_decay: not given") for note in config.notes)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"type": "Adam", "params": {"bias_correction": False}}, "optimizer.params.bias_correction: false is not"),
        ({"type": "Adam", "params": {"betas": [0.9]}}, "optimizer.params.betas: expected a list of 2"),
        ({"type": "Adam", "params": {"betas": [0.9, 1.0]}}, "optimizer.params.betas: expected a list of 2"),
        ({"type": "SGD", "params": {"lr": -0.1}}, "optimizer.params.lr: expected a number >= 0, got -0.1"),
        ({"params": {"lr": 0.1}}, "optimizer.type: missing"),
        ({"type": "Muon"}, 'optimizer.type: "Muon" is not available yet'),
        ({"type": 3}, "optimizer.type: expected a string, got 3"),
    ],
)
def test_a_wrong_optimizer_section_is_refused(section: dict[str, Any], problem: str) -> None:
    (found,) = problems({"optimizer": section})
    assert found.startswith(problem)


def test_a16_total_steps_of_zero_names_the_field_and_one_works() -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}
    assert problems({"scheduler": section}) == ["scheduler.params.total_num_steps: expected an integer >= 1, got 0"]
    scheduler = load(scheduler={"type": "warmupdecaylr", "params": {"total_num_steps": 1}}).scheduler
    assert scheduler is not None
    assert (scheduler.type, scheduler.params) == ("WarmupDecayLR", {"total_num_steps": 1})


def test_a_required_parameter_that_is_missing_is_named() -> None:
    (problem,) = problems({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}})
    assert problem.startswith("scheduler.params.cycle_max_lr: missing; expected a number >= 0, or a list of one such")
    assert problems({"scheduler": {"params": {}, "type": None}}) == [
        "scheduler.type: missing; name the class to build, or take the section out"
    ]


def test_parameters_on_a_disk_need_their_folder() -> None:
    on_disk = {"device": "nvme", "nvme_path": "/mnt/a", "max_in_cpu": 1e6}
    config = load(train_batch_size=4, zero_optimization={"stage": 3, "offload_param": on_disk})
    assert (config.offload.param_path, config.offload.param_max_in_cpu) == ("/mnt/a", 1_000_000)
    assert problems({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}) == [
        'zero_optimization.offload_param.nvme_path: missing; "nvme" needs the folder of the disk'
    ]
    (problem,) = problems(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": on_disk,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/b"},
            }
        }
    )
    assert problem.startswith("zero_optimization.offload_param.nvme_path: one folder serves both, got '/mnt/a'")


def test_a_ratio_goes_with_host_memory() -> None:
    half = {"device": "cpu", "ratio": 0.5}
    assert load(train_batch_size=4, zero_optimization={"stage": 1, "offload_optimizer": half}).offload.ratio == 0.5
    half = {"device": "nvme", "nvme_path": "/mnt/a", "ratio": 0.5}
    (problem,) = problems({"zero_optimization": {"stage": 1, "offload_optimizer": half}})
    assert problem.startswith('zero_optimization.offload_optimizer.ratio: expected 1 with device "nvme", got 0.5')


def test_a_file_as_front_ends_write_it_loads_in_drop_in_mode() -> None:
    offload = {"device": "none", "nvme_path": None, "pin_memory": True}
    config = load(
        True,
        train_batch_size=4,
        gradient_accumulation_steps=1,
        steps_per_print=float("inf"),
        gradient_clipping=1.0,
        wall_clock_breakdown=False,
        zero_allow_untested_optimizer=True,
        bf16={"enabled": True},
        fp16={"enabled": False, "auto_cast": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        amp={"enabled": "auto", "opt_level": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 100, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 10},
        },
        zero_optimization={
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": {**offload, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        activation_checkpointing={"partition_activations": False, "number_checkpoints": None},
        pipeline={"stages": "auto", "partition_method": "parameters"},
        tensor_parallel={"tp_size": 1},
    )
    assert (config.param_dtype, config.zero.stage, config.logging.steps_per_print) == ("bf16", 3, None)
    assert [note.split(" ")[0] for note in config.notes] == ["pipeline.stages:", "without"]


@pytest.mark.parametrize("key", ["tp_size", "autotp_size", "tp.tp_size"])
def test_tensor_parallel_ranks_under_each_of_their_names(key: str) -> None:
    assert load(**nested(f"tensor_parallel.{key}", 4)).tensor.num_ranks == 4
    assert load(**nested(f"tensor_parallel.{key}", 0)).tensor.num_ranks == 1


def test_tensor_parallel_ranks_given_twice() -> None:
    same = {"tensor_parallel": {"tp_size": 2, "autotp_size": 2}}
    assert load(**same).tensor.num_ranks == 2
    (problem,) = problems({"tensor_parallel": {"tp_size": 2, "tp": {"tp_size": 4}}})
    assert problem.startswith("tensor_parallel.tp_size is 2, tensor_parallel.tp.tp_size is 4: these keys")
