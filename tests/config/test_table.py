"""The key table is complete: every key that DeepSpeed documents has an entry, and every entry leads somewhere."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

import shardcore.config as door
from shardcore.config import OPTIMIZERS, REQUIRED, SCHEDULES, SECTION_KEYS, TABLE, Field, Ignored, Removed, Unsupported
from shardcore.config.sections import SECTIONS, default_of

DOCUMENTED: dict[str, str] = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
        steps_per_print gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op
        communication_data_type seq_parallel_communication_data_type sparse_gradients disable_allgather
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer graph_harvesting wall_clock_breakdown
        memory_breakdown dump_state dataloader_drop_last log_level vocabulary_size use_data_before_expert_parallelism
        sequence_parallel_size data_parallel_size datastates_ckpt""",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states""",
    "bfloat16": "enabled",
    "amp": "enabled",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint
        sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
        mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory cpu_offload
        cpu_offload_params cpu_offload_use_pin_memory""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc""",
    "zero_optimization.zenflow": """
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio
        full_warm_up_rounds pt_reserved_cores_perc""",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "pipeline": """
        stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant
        partition_method""",
    "tensor_parallel": """
        autotp_size dtype tp_overlap_comm keep_module_on_host kernel_inject injection_policy_tuple preset_model
        partition_config tp_size""",
    "tensor_parallel.tp": "tp_size tp_grain_size mpu tp_group",
    "expert_parallel": "enabled autoep_size expert_tensor_parallel_size preset_model",
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile""",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "flops_profiler": """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file""",
    "timers.throughput": "enabled synchronized",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": """
        enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode""",
    "checkpoint": "tag_validation load_universal use_node_local_storage checkpoint_serialization",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": """
        type io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier decoupled""",
    "nebula": """
        enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load
        nebula_load_path""",
    "elasticity": """
        enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node model_parallel_size
        min_time prefer_larger_batch ignore_non_elastic_batch_info version""",
    "autotuning": """
        enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type
        tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size
        max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size
        model_info""",
}
"""Every key of DeepSpeed 0.19 by section."""

OURS = {
    "zero_optimization.replicate_size",
    "zero_optimization.replicate_inside",
    "activation_checkpointing.policy",
    "activation_checkpointing.units",
    "pipeline.schedule",
    "pipeline.num_chunks",
    "sequence_parallel_attention",
}
OLDER_BLOCKS = {
    "compile", "compression_training", "curriculum_learning", "data_efficiency", "progressive_layer_drop", "eigenvalue",
    "quantize_training", "sparse_attention", "hybrid_engine",
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "managed_gradient_accumulation": True,
    "zero_optimization.leaf_module.classes": (
        "MixtralSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
    ),
    "zero_optimization.leaf_module.names": (),
    "zero_optimization.leaf_module.name_suffixes": (),
    "data_parallel_size": None,
    "steps_per_print": None,
    "gradient_clipping": None,  # DeepSpeed: 1.0; so it is here in drop-in mode, and none natively
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "communication_data_type": None,
    "wall_clock_breakdown": False,
    "dump_state": False,
    "dataloader_drop_last": False,
    "checkpoint.tag_validation": "Warn",
    "log_level": None,
    "fp16.enabled": False,
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "bf16.enabled": False,
    "bf16.check_grad_overflow": True,
    "bfloat16.enabled": False,
    "bfloat16.check_grad_overflow": True,
    "data_types.grad_accum_dtype": None,
    "data_types.param_dtype": None,
    "zero_optimization.stage": 0,
    "zero_optimization.reduce_bucket_size": 5e8,
    "zero_optimization.stage3_prefetch_bucket_size": 5e7,
    "zero_optimization.stage3_param_persistence_threshold": 1e5,
    "zero_optimization.stage3_max_live_parameters": 1e9,
    "zero_optimization.stage3_max_reuse_distance": 1e9,
    "zero_optimization.replicate_size": 1,
    "pipeline.stages": 1,  # DeepSpeed never reads these two
    "pipeline.partition": None,  # then "parameters", which "best" stands for
    "pipeline.partition_method": None,
    "pipeline.schedule": "1f1b",
    "pipeline.num_chunks": None,
    "tensor_parallel.autotp_size": 0,
    "tensor_parallel.tp_size": 1,
    "tensor_parallel.tp.tp_size": 1,
    "sequence_parallel_size": 1,
    "sequence_parallel_attention": "ulysses",
    "expert_parallel.enabled": False,
    "expert_parallel.autoep_size": 1,
    "expert_parallel.expert_tensor_parallel_size": 1,
    "zero_optimization.replicate_inside": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.mics_hierarchical_params_gather": False,
    "zero_optimization.overlap_comm": True,  # DeepSpeed: at stage 3 only; here it changes no number at any stage
    "zero_optimization.sub_group_size": None,  # DeepSpeed: 1e9, which leaves nothing to overlap
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.offload_param.nvme_path": None,
    "zero_optimization.offload_param.max_in_cpu": None,  # DeepSpeed: 1e9, beside its buffers; it changes no number
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": None,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_optimizer.buffer_count": 4,
    "zero_optimization.offload_optimizer.pin_memory": True,
    "pipeline.activation_checkpoint_interval": 0,
    "activation_checkpointing.policy": None,
    "activation_checkpointing.units": (),
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.contiguous_memory_optimization": False,
    "activation_checkpointing.number_checkpoints": None,
    "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "activation_checkpointing.profile": False,
    "aio.block_size": 1048576,
    "aio.queue_depth": 32,  # DeepSpeed: 8; the depth changes no number
    "optimizer.type": dataclasses.MISSING,
    "optimizer.params": dataclasses.MISSING,
    "scheduler.type": dataclasses.MISSING,
    "scheduler.params": dataclasses.MISSING,
}
"""The default of every honoured key, as DeepSpeed documents it; a comment gives the reason where ours differs."""


def documented() -> list[str]:
    return [f"{section}.{name}".lstrip(".") for section, names in DOCUMENTED.items() for name in names.split()]


@pytest.mark.parametrize("path", documented())
def test_every_documented_key_has_an_entry(path: str) -> None:
    entry = door.lookup(path)
    assert isinstance(entry, Field | Ignored | Unsupported | Removed), f"{path} is missing from the table"


def test_the_table_holds_no_key_that_nobody_documents() -> None:
    misplaced = {path for path, entry in TABLE.items() if isinstance(entry, door.Misplaced)}
    aliases = {path for path in TABLE if path.startswith("bfloat16.")}
    blocks = {path for path, entry in TABLE.items() if isinstance(entry, Removed) and entry.keys}
    assert set(TABLE) - set(documented()) - misplaced - aliases - blocks == OURS | (OLDER_BLOCKS - blocks)


def test_an_unknown_key_has_none() -> None:
    assert [door.lookup(path) for path in ("nothing", "fp16.nothing", "elasticity.nothing", "nothing.at.all")] == [
        None
    ] * 4


@pytest.mark.parametrize("path", [path for path, entry in TABLE.items() if isinstance(entry, Field)])
def test_an_honoured_key_sets_a_field_with_the_documented_default(path: str) -> None:
    entry = TABLE[path]
    assert isinstance(entry, Field)
    section, name = entry.target.split(".")
    assert name in {field.name for field in dataclasses.fields(SECTIONS[section])}
    assert default_of(entry.target) == DEFAULTS[path]


def test_every_field_of_every_section_can_be_set() -> None:
    targets = {entry.target for entry in TABLE.values() if isinstance(entry, Field)}
    fields = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in dataclasses.fields(section)}
    assert targets == fields


def test_every_refusal_and_every_ignored_key_has_a_reason() -> None:
    reasons = [entry.reason for entry in TABLE.values() if isinstance(entry, Ignored | Unsupported | Removed)]
    reasons += [entry.hint for entry in TABLE.values() if isinstance(entry, door.Misplaced)]
    assert len(reasons) > 100
    assert all(len(reason) > 10 for reason in reasons)


@pytest.mark.parametrize("path", [path for path, entry in TABLE.items() if isinstance(entry, Unsupported)])
def test_a_neutral_value_is_one_that_the_key_accepts(path: str) -> None:
    entry = TABLE[path]
    assert isinstance(entry, Unsupported)
    assert entry.neutral
    assert all(entry.kind.parse(value) == value for value in entry.neutral)


def test_no_key_is_both_a_section_and_a_value() -> None:
    assert set(TABLE) & set(SECTION_KEYS) == set()


SCHEDULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": REQUIRED,
        "cycle_max_lr": REQUIRED,
        "decay_lr_rate": 0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0,
    },
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": REQUIRED,
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": REQUIRED,
        "warmup_min_ratio": 0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 1e-4,
        "warmup_type": "log",
    },
}


def test_the_schedules_have_the_documented_parameters_and_defaults() -> None:
    ours = {
        schedule: {name: parameter.default for name, parameter in known.items()}
        for schedule, known in SCHEDULES.items()
    }
    assert ours == {name: {**known, "last_batch_iteration": -1} for name, known in SCHEDULE_DEFAULTS.items()}


def test_adams_extra_parameters_are_known() -> None:
    assert {"torch_adam", "adam_w_mode", "fp32_optimizer_states"} <= set(OPTIMIZERS["Adam"]) & set(OPTIMIZERS["AdamW"])


def test_every_name_of_the_door_exists() -> None:
    assert all(hasattr(door, name) for name in door.__all__)
    assert len(typing.get_args(door.Entry)) == 5
