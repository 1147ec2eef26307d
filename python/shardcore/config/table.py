"""The key table: what this library does with every key of a DeepSpeed configuration file.

A key is honoured (`Field`), accepted without effect (`Ignored`), refused unless its value asks for nothing
(`Unsupported`: not there yet; `Removed`: not part of this library), or an error because its meaning is elsewhere
(`Misplaced`). To honour a key, give its section a field and its entry here becomes a `Field`.
"""

from __future__ import annotations

from shardcore.config.keys import Entry, Field, Ignored, Misplaced, Removed, Unsupported, under
from shardcore.config.kinds import (
    ANYTHING,
    BOOL,
    FLOAT_DTYPE,
    MAPPING,
    PERIOD,
    TEXT,
    Kind,
    choice,
    integer,
    list_of,
    number,
)

INTEGER = integer()
COUNT = integer(low=0)
SIZE = integer(low=1)
AMOUNT = number(low=0)
POSITIVE = number(above=0)
TEXTS = list_of(TEXT)


def _later(feature: str, kind: Kind = BOOL, *neutral: object) -> Unsupported:
    """A key of a feature that this version does not have."""
    return Unsupported(f"{feature}: not available yet", kind, neutral or (False,))


def _each(reason: str, **kinds: Kind) -> dict[str, Entry]:
    """Keys that are ignored for one reason."""
    return {name: Ignored(reason, kind) for name, kind in kinds.items()}


# ------------------------------------------------------------------------------------------------ top level
_DIVISION = "the mean is taken in fp32 as gradients are summed, wherever the division stands"
_CHECKPOINTS = "every checkpoint is written by all ranks at once, and loads on any number of them"
_TOP: dict[str, Entry] = {
    "train_batch_size": Field("batch.train_batch_size", INTEGER),
    "train_micro_batch_size_per_gpu": Field("batch.micro_batch_size", INTEGER),
    "gradient_accumulation_steps": Field("batch.accumulation_steps", INTEGER),
    "managed_gradient_accumulation": Field("batch.managed", BOOL),
    "data_parallel_size": Field("batch.data_parallel_size", SIZE),
    "steps_per_print": Field("logging.steps_per_print", PERIOD),
    "wall_clock_breakdown": Field("logging.wall_clock_breakdown", BOOL),
    "dump_state": Field("logging.dump_state", BOOL),
    "log_level": Field("logging.level", choice("debug", "info", "warning", "error", "critical")),
    "dataloader_drop_last": Field("data.drop_last", BOOL),
    "gradient_clipping": Field("gradients.clipping", AMOUNT),
    "prescale_gradients": Ignored(_DIVISION, BOOL),
    "gradient_predivide_factor": Ignored(_DIVISION, POSITIVE),
    "communication_data_type": Field("gradients.communication_dtype", FLOAT_DTYPE),
    "gradient_allreduce_op": Unsupported(
        "gradients are averaged over ranks; multiply the loss by the number of ranks to get a sum",
        choice("mean", "sum"),
        ("mean",),
    ),
    "seq_parallel_communication_data_type": Ignored(
        "activations travel between the ranks of a sequence in their own dtype", FLOAT_DTYPE
    ),
    "sequence_parallel_size": Field("sequence.num_ranks", SIZE),
    "sequence_parallel_attention": Field("sequence.attention", choice("ulysses", "ring")),
    "use_data_before_expert_parallelism": Ignored("the ranks of different experts are neighbours", BOOL),
    "memory_breakdown": Ignored("nothing is printed for it; torch.profiler shows memory by phase", BOOL),
    "vocabulary_size": Ignored("DeepSpeed only warns by it", SIZE),
    "disable_allgather": Ignored("parameters are always gathered by one collective per group", BOOL),
    "zero_allow_untested_optimizer": Ignored("every optimizer is probed when it is built", BOOL),
    "zero_force_ds_cpu_optimizer": Ignored("every element-wise optimizer can be offloaded", BOOL),
    "sparse_gradients": Removed("embedding gradients are reduced densely"),
    "graph_harvesting": Removed("compile the blocks of the model in its place"),
    "amp": Removed("use bf16 or fp16", ("enabled", "opt_level")),
    "compile": Removed("compile the blocks of the model: block.compile()", ("deepcompile",)),
    "compression_training": Removed("compression while training is outside its scope"),
    "curriculum_learning": Removed("order the samples in the data set"),
    "data_efficiency": Removed("order the samples in the data set"),
    "progressive_layer_drop": Removed("drop layers in the model"),
    "eigenvalue": Removed("it serves quantised training only"),
    "quantize_training": Removed("quantised training is outside its scope"),
    "sparse_attention": Removed("choose attention kernels in the model"),
    "hybrid_engine": Removed("generation by kernel injection is outside its scope", ("enabled",)),
    "elasticity": Removed(
        "give the batch sizes of this run",
        (
            "enabled", "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "num_gpus_per_node",
            "model_parallel_size", "min_time", "prefer_larger_batch", "ignore_non_elastic_batch_info", "version",
        ),
    ),
    "nebula": Removed(
        "there is one kind of storage, files at a path",
        (
            "enabled", "persistent_storage_path", "persistent_time_interval", "num_of_version_in_retention",
            "enable_nebula_load", "nebula_load_path",
        ),
    ),
    "datastates_ckpt": Removed("there is one kind of storage, files at a path"),
}  # fmt: skip

# --------------------------------------------------------------------------------- optimizer and scheduler
_OPTIMIZER: dict[str, Entry] = {
    "type": Field("optimizer.type", TEXT),
    "params": Field("optimizer.params", MAPPING),
    "legacy_fusion": Ignored("torch's own fused update is used where it is faster", BOOL),
}
_SCHEDULER: dict[str, Entry] = {
    "type": Field("scheduler.type", TEXT),
    "params": Field("scheduler.params", MAPPING),
}

# ------------------------------------------------------------------------------------------------ precision
_FP16: dict[str, Entry] = {
    "enabled": Field("fp16.enabled", BOOL),
    "auto_cast": Ignored("floating inputs of the model are always cast", BOOL),
    "loss_scale": Field("fp16.loss_scale", AMOUNT),
    "initial_scale_power": Field("fp16.initial_scale_power", integer(low=0, high=126)),
    "loss_scale_window": Field("fp16.loss_scale_window", SIZE),
    "hysteresis": Field("fp16.hysteresis", SIZE),
    "consecutive_hysteresis": Field("fp16.consecutive_hysteresis", BOOL),
    "min_loss_scale": Field("fp16.min_loss_scale", POSITIVE),
    "fp16_master_weights_and_grads": _later("16-bit master weights"),
}
_FP16_ONLY = Misplaced("fp16 only: bfloat16 reaches as far as float32 and takes no loss scale; remove it")
_BF16: dict[str, Entry] = {
    "enabled": Field("bf16.enabled", BOOL),
    "check_grad_overflow": Field("bf16.check_grad_overflow", BOOL),
    "immediate_grad_update": Ignored("gradients are always added to their accumulator as they appear", BOOL),
    "bf16_master_weights_and_grads": _later("16-bit master weights"),
    "bf16_optimizer_states": _later("16-bit optimizer states"),
    **{name: _FP16_ONLY for name in _FP16 if name not in ("enabled", "fp16_master_weights_and_grads")},
}
_AUTOCAST: dict[str, Entry] = {
    "enabled": _later("torch autocast regions"),
    "dtype": Ignored("takes effect with torch_autocast.enabled", TEXT),
    "lower_precision_safe_modules": Ignored("takes effect with torch_autocast.enabled", TEXTS),
}
_DATA_TYPES: dict[str, Entry] = {
    "grad_accum_dtype": Ignored("gradients are always summed in fp32", FLOAT_DTYPE),
    "param_dtype": Field("data_types.param_dtype", FLOAT_DTYPE),
    "buffer_dtype": _later("casting buffers (they keep their dtype)", FLOAT_DTYPE, "fp32"),
}

# --------------------------------------------------------------------------------------- zero_optimization
_IN_PLACE = "a group's flat buffer serves the collective in place"
_ONE_ROOM = "host memory for parameters is one piece, for shards of any size; max_in_cpu says how large it is"
_ZERO: dict[str, Entry] = {
    "stage": Field("zero.stage", integer(low=0, high=3)),
    "reduce_bucket_size": Field("zero.reduce_bucket_size", SIZE),
    "overlap_comm": Ignored("reduction always overlaps backward; the result is the same", BOOL),
    "replicate_size": Field("network.replicate_size", SIZE),
    "replicate_inside": Field("network.replicate_inside", BOOL),
    "contiguous_gradients": Ignored("gradients always live in one flat buffer per group", BOOL),
    "reduce_scatter": Ignored("stages 1 to 3 always reduce by reduce-scatter", BOOL),
    "use_multi_rank_bucket_allreduce": Ignored("there is always one collective per bucket", BOOL),
    "allgather_partitions": Ignored("parameters are always gathered by one all-gather per group", BOOL),
    "allgather_bucket_size": Ignored(_IN_PLACE, SIZE),
    "load_from_fp32_weights": Ignored("masters are always restored from their own copy", BOOL),
    "elastic_checkpoint": Ignored(_CHECKPOINTS, BOOL),
    "sub_group_size": Field("offload.sub_group_size", SIZE),
    "stage3_prefetch_bucket_size": Field("zero.prefetch_bucket_size", COUNT),
    "stage3_param_persistence_threshold": Field("zero.param_persistence_threshold", COUNT),
    "stage3_model_persistence_threshold": Ignored("nothing stays gathered from step to step", COUNT),
    "stage3_max_live_parameters": Field("zero.max_live_parameters", COUNT),
    "stage3_max_reuse_distance": Field("zero.max_reuse_distance", COUNT),
    "stage3_gather_16bit_weights_on_model_save": Ignored("a full state dict can always be taken", BOOL),
    "stage3_gather_fp16_weights_on_model_save": Ignored("a full state dict can always be taken", BOOL),
    "stage3_module_granularity_threshold": Ignored("units are whole blocks, never single small modules", COUNT),
    "stage3_use_all_reduce_for_fetch_params": Ignored(_IN_PLACE, BOOL),
    "stage3_allgather_sequential": Ignored("gathers always start in the order of the plan", BOOL),
    "ignore_unused_parameters": Unsupported(
        "parameters without a gradient are skipped, as torch skips them", BOOL, (True,)
    ),
    "legacy_stage1": Removed("there is one way to shard for all stages"),
    "round_robin_gradients": Ignored("every rank owns an equal share of each group", BOOL),
    "zero_hpz_partition_size": Field("network.hpz_partition_size", SIZE),
    "zero_quantized_weights": Field("network.quantized_weights", BOOL),
    "zero_quantized_nontrainable_weights": Field("network.quantized_frozen_weights", BOOL),
    "zero_quantized_gradients": Field("network.quantized_gradients", BOOL),
    "zeropp_loco_param": Ignored("quantised gradients always feed their whole error back into the next", MAPPING),
    "mics_shard_size": Field("network.mics_shard_size", integer(low=-1)),
    "mics_hierarchical_params_gather": Field("network.hierarchical", BOOL),
    "memory_efficient_linear": Ignored("autograd keeps no gathered weight alive", BOOL),
    "pipeline_loading_checkpoint": Ignored(_CHECKPOINTS, BOOL),
    "override_module_apply": Ignored("open a model with shardcore.summon before changing it as a whole", BOOL),
    "log_trace_cache_warnings": Ignored("there is no trace cache", BOOL),
    "enable_sanity_checks": Ignored("the checks are always on", BOOL),
    "save_muon_momentum_buffer_in_memory": Ignored("takes effect with the Muon optimizer", BOOL),
    "cpu_offload": Unsupported('write "offload_optimizer": {"device": "cpu"}', BOOL, (False,)),
    "cpu_offload_params": Unsupported('write "offload_param": {"device": "cpu"}', BOOL, (False,)),
    "cpu_offload_use_pin_memory": Ignored("offload_optimizer.pin_memory says it", BOOL),
    "zenflow": Removed(
        "partial updates change what is trained",
        (
            "topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload",
            "auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc",
        ),
    ),
}  # fmt: skip
_LEAF_MODULE: dict[str, Entry] = {
    "classes": Field("leaves.classes", TEXTS),
    "names": Field("leaves.names", TEXTS),
    "name_suffixes": Field("leaves.name_suffixes", TEXTS),
}
_DEVICE = choice("none", "cpu", "nvme")
_OFFLOAD_PARAM: dict[str, Entry] = {
    "device": Field("offload.param_device", _DEVICE),
    "pin_memory": Field("offload.param_pin", BOOL),
    "nvme_path": Field("offload.param_path", TEXT),
    "max_in_cpu": Field("offload.param_max_in_cpu", COUNT),
    **_each(_ONE_ROOM, buffer_count=SIZE, buffer_size=SIZE),
}
_OFFLOAD_OPTIMIZER: dict[str, Entry] = {
    "device": Field("offload.optimizer_device", _DEVICE),
    "nvme_path": Field("offload.optimizer_path", TEXT),
    "buffer_count": Field("offload.buffer_count", SIZE),
    "pin_memory": Field("offload.optimizer_pin", BOOL),
    "ratio": Field("offload.ratio", number(low=0, high=1)),
    "super_offload": _later("updates that start before the gradient norm is known"),
    **_each("reads and writes always overlap the update", pipeline_read=BOOL, pipeline_write=BOOL),
    "fast_init": Ignored("nothing is written to the disk before the first update", BOOL),
    "cpuadam_cores_perc": Ignored("the update uses as many threads as torch", number(low=0, high=1)),
}
_ONE_QUEUE = "one queue takes all transfers and reports each when it ends"
_AIO: dict[str, Entry] = {
    "block_size": Field("offload.block_size", SIZE),
    "queue_depth": Field("offload.queue_depth", SIZE),
    **_each(_ONE_QUEUE, intra_op_parallelism=SIZE, thread_count=SIZE, single_submit=BOOL, overlap_events=BOOL),
    "use_gds": _later("transfers between disk and GPU without host memory"),
}

# ---------------------------------------------------------------------------- parallelism and recomputation
_PIPE: dict[str, Entry] = {
    "stages": Field("pipeline.num_stages", SIZE),
    "partition": Field("pipeline.partition", TEXT),
    "partition_method": Field("pipeline.partition_method", TEXT),
    "schedule": Field("pipeline.schedule", TEXT),
    "num_chunks": Field("pipeline.num_chunks", SIZE),
    "activation_checkpoint_interval": Field("activation.interval", COUNT),
    "seed_layers": Ignored("a model's stages start from the weights that it has, LayerSpecs from seed and place", BOOL),
    **_each(
        "each tensor-parallel rank hands what it holds to its own successor",
        pipe_partitioned=BOOL,
        grad_partitioned=BOOL,
    ),
    "use_reentrant": Ignored("recomputation never re-enters autograd; the result is the same", BOOL),
}
_TENSOR_PARALLEL: dict[str, Entry] = {
    "autotp_size": Field("tensor.autotp_size", COUNT),
    "tp_size": Field("tensor.tp_size", COUNT),
    "dtype": Ignored("the precision is that of the fp16 and bf16 sections", TEXT),
    "tp_overlap_comm": Ignored("sums of input gradients always travel under the weight gradients", BOOL),
    "kernel_inject": Ignored("for inference only", BOOL),
    "keep_module_on_host": Ignored("each rank keeps its part of the weights where the model has them", BOOL),
    "preset_model": Ignored("how a model is split is read from the model", TEXT),
    "injection_policy_tuple": Ignored("how a model is split is read from the model", ANYTHING),
    "partition_config": _later("patterns in the file; give them to shardcore.tensor.parallelize", MAPPING, {}),
}
_TENSOR_TP: dict[str, Entry] = {
    "tp_size": Field("tensor.nested_tp_size", COUNT),
    "tp_grain_size": Ignored("parts may have any size", SIZE),
    **_each("the mesh is given to initialize(mesh_param=...)", mpu=ANYTHING, tp_group=ANYTHING),
}
_EXPERT_PARALLEL: dict[str, Entry] = {
    "enabled": Field("experts.enabled", BOOL),
    "autoep_size": Field("experts.autoep_size", SIZE),
    "expert_tensor_parallel_size": Field("experts.tensor_size", SIZE),
    "preset_model": Ignored("how experts are split is read from the model", TEXT),
}
_ACTIVATION: dict[str, Entry] = {
    "policy": Field("activation.policy", choice("none", "full", "selective")),
    "units": Field("activation.units", TEXTS),
    "partition_activations": Field("activation.partition", BOOL),
    "cpu_checkpointing": Field("activation.cpu", BOOL),
    "contiguous_memory_optimization": Field("activation.contiguous", BOOL),
    "number_checkpoints": Field("activation.num_checkpoints", SIZE),
    "synchronize_checkpoint_boundary": Field("activation.synchronize", BOOL),
    "profile": Field("activation.profile", BOOL),
}

# -------------------------------------------------------------------------------- logging, checkpoint, tuning
_MONITOR = "experiment monitors"
_LOGGER: dict[str, Entry] = {
    "enabled": _later("a log of collectives"),
    **_each("takes effect with comms_logger.enabled", verbose=BOOL, prof_all=BOOL, debug=BOOL, prof_ops=TEXTS),
}
_PROFILER: dict[str, Entry] = {
    "enabled": _later("the flops profiler"),
    **_each(
        "takes effect with flops_profiler.enabled", recompute_fwd_factor=AMOUNT, profile_step=SIZE,
        module_depth=integer(low=-1), top_modules=SIZE, detailed=BOOL, output_file=TEXT,
    ),
}  # fmt: skip
_TIMERS = _each("throughput is on every progress line", enabled=BOOL, synchronized=BOOL)


def _monitor(**kinds: Kind) -> dict[str, Entry]:
    return {"enabled": _later(_MONITOR), **_each("takes effect with an enabled monitor", **kinds)}


_CHECKPOINT: dict[str, Entry] = {
    "tag_validation": Field("checkpoint.tag_validation", choice("Ignore", "Warn", "Fail")),
    "load_universal": Ignored(
        "every checkpoint loads on any number of ranks; DeepSpeed's are imported first, by shardcore ckpt "
        "import-deepspeed",
        BOOL,
    ),
    "use_node_local_storage": _later("checkpoints on node-local disks"),
    "checkpoint_serialization": Ignored(_CHECKPOINTS, BOOL),
    "parallel_write.pipeline_stage": Ignored(_CHECKPOINTS, BOOL),
}
_WRITER = _each(
    _CHECKPOINTS, type=choice("fast", "python", "mock"), io_buffer_size=SIZE, io_buffer_double=BOOL,
    show_statistics=BOOL, data_parallel=choice("replica", "socket", "machine"), io_multiplier=SIZE, decoupled=BOOL,
)  # fmt: skip
_AUTOTUNING: dict[str, Entry] = {
    "enabled": _later("tuning runs"),
    **_each(
        "read by a tuner, not by a training run", fast=BOOL, results_dir=TEXT, exps_dir=TEXT, overwrite=BOOL,
        start_profile_step=COUNT, end_profile_step=COUNT, metric=choice("throughput", "latency", "flops"),
        metric_path=TEXT, tuner_type=choice("gridsearch", "random", "model_based"), tuner_early_stopping=COUNT,
        tuner_num_trials=SIZE, arg_mappings=MAPPING, max_train_batch_size=SIZE, min_train_batch_size=SIZE,
        max_train_micro_batch_size_per_gpu=SIZE, min_train_micro_batch_size_per_gpu=SIZE,
        num_tuning_micro_batch_sizes=SIZE, mp_size=SIZE, model_info=MAPPING,
    ),
}  # fmt: skip

TABLE: dict[str, Entry] = {
    **_TOP,
    **under("optimizer", _OPTIMIZER),
    **under("scheduler", _SCHEDULER),
    **under("fp16", _FP16),
    **under("bf16", _BF16),
    **under("bfloat16", _BF16),
    **under("torch_autocast", _AUTOCAST),
    **under("data_types", _DATA_TYPES),
    **under("zero_optimization", _ZERO),
    **under("zero_optimization.leaf_module", _LEAF_MODULE),
    **under("zero_optimization.offload_param", _OFFLOAD_PARAM),
    **under("zero_optimization.offload_optimizer", _OFFLOAD_OPTIMIZER),
    **under("aio", _AIO),
    **under("pipeline", _PIPE),
    **under("tensor_parallel", _TENSOR_PARALLEL),
    **under("tensor_parallel.tp", _TENSOR_TP),
    **under("expert_parallel", _EXPERT_PARALLEL),
    **under("activation_checkpointing", _ACTIVATION),
    **under("comms_logger", _LOGGER),
    **under("flops_profiler", _PROFILER),
    **under("timers.throughput", _TIMERS),
    **under("tensorboard", _monitor(output_path=TEXT, job_name=TEXT)),
    **under("csv_monitor", _monitor(output_path=TEXT, job_name=TEXT)),
    **under("wandb", _monitor(group=TEXT, team=TEXT, project=TEXT)),
    **under(
        "comet",
        _monitor(
            samples_log_interval=SIZE, project=TEXT, workspace=TEXT, api_key=TEXT, experiment_name=TEXT,
            experiment_key=TEXT, online=BOOL, mode=TEXT,
        ),
    ),
    **under("checkpoint", _CHECKPOINT),
    **under("checkpoint.writer", _WRITER),
    **under("autotuning", _AUTOTUNING),
}  # fmt: skip
"""Every known key by its full dotted path; a `Removed` entry covers the block below it."""


def lookup(path: str) -> Entry | None:
    """The entry that decides about a dotted path: its own, or that of a removed block around it."""
    if path in TABLE:
        return TABLE[path]
    block, _, name = path.rpartition(".")
    entry = lookup(block) if block else None
    return entry if isinstance(entry, Removed) and name in entry.keys else None


def _sections() -> dict[str, frozenset[str]]:
    names: dict[str, set[str]] = {}
    for path in TABLE:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            names.setdefault(".".join(parts[:depth]), set()).add(part)
    return {path: frozenset(known) for path, known in names.items()}


SECTION_KEYS: dict[str, frozenset[str]] = _sections()
"""The names known directly inside each section; "" is the top level."""
