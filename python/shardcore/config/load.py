"""`load_config`: from a configuration file to a `Config`, with every problem reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardcore.config.batch import check_numbers, solve_batch
from shardcore.config.choose import choose_optimizer, choose_scheduler
from shardcore.config.config import Config
from shardcore.config.keys import Field
from shardcore.config.read import Source, read_source
from shardcore.config.sections import SECTIONS, PipelineConfig, TensorConfig
from shardcore.config.table import TABLE
from shardcore.config.walk import Findings, walk
from shardcore.errors import ConfigError, DropInConfigError

DROP_IN_CLIPPING = 1.0
_PARTITIONS = ("parameters", "uniform", "best")
_BATCH_KEYS = tuple(
    path for path, entry in TABLE.items() if isinstance(entry, Field) and entry.target.startswith("batch.")
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """Names of the classes that a configuration may ask for; torch knows them, which this room does without."""

    optimizers: Collection[str] | None = None
    """None: any."""
    schedules: Collection[str] | None = None
    """None: any."""


def load_config(
    source: Source,
    *,
    data_world: int | Callable[[Config], int | None] | None = None,
    drop_in: bool = False,
    accumulation_argument: int | None = None,
    classes: Classes | None = None,
) -> Config:
    """Reads, checks and resolves a configuration in DeepSpeed's JSON format.

    Args:
        source: a dict (never modified), the path of a JSON file (comments and trailing commas allowed), or the
            base64 form of a JSON object.
        data_world: number of data-parallel ranks, or a function of the configuration without batch sizes that tells
            it. None defers the batch triangle to `Config.resolve_batch`.
        drop_in: DeepSpeed's defaults hold where they differ from this library's own (clipping at 1.0, no weight
            decay in AdamW), and errors are also AssertionErrors.
        accumulation_argument: the accumulation count that a caller passed besides the file. It fills the key in
            where the file leaves it out or says "auto"; a different number in the file is an error.
        classes: what can be built, so that another ``type`` is a problem like any other. None accepts any name, to be
            judged when it is built.

    In a file, null means "not given". "auto" inside a section stands for the default; at the top level it is an
    error unless an argument supplies the value. Keys that begin with ``x-`` are the user's own and pass.

    Raises:
        ConfigError: the numbered list of all problems, each with its dotted path, what was expected and what was
            found, and the nearest known name.
    """
    raw, label = read_source(source)
    findings = Findings()
    walk(_with_argument(raw, accumulation_argument, label, findings), findings)
    sections = _sections(findings, drop_in, classes or Classes())
    _check_precision(sections, findings)
    _check_offload(sections, findings)
    _check_network(sections, findings)
    _check_tensor(sections["tensor"], findings)
    _check_pipeline(sections["pipeline"], findings)
    _check_sequence(sections, findings)
    _check_experts(sections, findings)
    config = Config(
        **sections,
        drop_in=drop_in,
        label=label,
        given=frozenset(findings.given),
        ignored=tuple(findings.ignored),
        notes=tuple(findings.all_notes()),
    )
    config = _with_batch(config, data_world(config) if callable(data_world) else data_world, findings)
    _raise_problems(findings, label, drop_in)
    return config


def _with_argument(raw: dict[str, Any], argument: int | None, label: str, findings: Findings) -> dict[str, Any]:
    """The raw configuration with the caller's accumulation count in it, unless the two contradict each other."""
    key = "gradient_accumulation_steps"
    in_file = raw.get(key)
    if argument is None or in_file == argument:
        return raw
    if in_file is not None and in_file != "auto":
        findings.problems.append(
            f"{key}: {label} says {in_file}, but the argument of the call says {argument}; "
            "give it once, or make the two equal"
        )
        return raw
    if in_file == "auto":
        findings.notes.append(f'{key}: "auto" stands for {argument}, the argument of the call')
    return {**raw, key: argument}


def _sections(findings: Findings, drop_in: bool, classes: Classes) -> dict[str, Any]:
    """The sections of `Config`, built from the values that the walk found."""
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for target, value in findings.values.items():
        section, name = target.split(".")
        values[section][name] = value
    _fill_clipping(values["gradients"], findings, drop_in)
    chosen = {
        "optimizer": choose_optimizer(values.pop("optimizer"), drop_in, findings, classes.optimizers),
        "scheduler": choose_scheduler(values.pop("scheduler"), findings, classes.schedules),
    }
    return {**chosen, **{name: SECTIONS[name](**given) for name, given in values.items()}}


def _fill_clipping(gradients: dict[str, Any], findings: Findings, drop_in: bool) -> None:
    """0 turns clipping off; where nothing is said, the drop-in clips as DeepSpeed does."""
    if "clipping" in gradients:
        gradients["clipping"] = gradients["clipping"] or None
    elif drop_in:
        gradients["clipping"] = DROP_IN_CLIPPING
        findings.notes.append(
            f"gradient_clipping: not given, so the global norm is clipped at {DROP_IN_CLIPPING} as in DeepSpeed 0.19.8 "
            "(older versions do not clip); 0 turns it off"
        )


def _check_precision(sections: Mapping[str, Any], findings: Findings) -> None:
    fp16, bf16, declared = sections["fp16"], sections["bf16"], sections["data_types"].param_dtype
    if fp16.enabled and bf16.enabled:
        findings.problems.append("fp16.enabled and bf16.enabled are both true; set one of them to false")
    mode = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    if declared not in (None, mode):
        findings.problems.append(
            f'data_types.param_dtype: expected "{mode}", which the fp16 and bf16 sections make it, got "{declared}"; '
            "leave it out, or enable the section that fits"
        )
    if fp16.dynamic and fp16.initial_scale < fp16.min_loss_scale:
        findings.problems.append(
            f"fp16.min_loss_scale: expected at most 2 ** fp16.initial_scale_power = {fp16.initial_scale:g}, "
            f"got {fp16.min_loss_scale:g}; lower it, or raise the power"
        )


def _check_offload(sections: Mapping[str, Any], findings: Findings) -> None:
    offload, stage = sections["offload"], sections["zero"].stage
    section = "zero_optimization.offload"
    if offload.param_device != "none" and stage < 3:
        findings.problems.append(
            f'{section}_param.device: "{offload.param_device}" needs zero_optimization.stage 3, got {stage}: at lower '
            "stages parameters are whole on the device all the time"
        )
    if offload.optimizer_device != "none" and stage < 1:
        findings.problems.append(
            f'{section}_optimizer.device: "{offload.optimizer_device}" needs zero_optimization.stage 1, 2 or 3, got 0'
        )
    if offload.ratio != 1 and offload.optimizer_device == "nvme":
        findings.problems.append(
            f'{section}_optimizer.ratio: expected 1 with device "nvme", got {offload.ratio:g}; a part stays on the '
            'device with "cpu" only'
        )
    paths = {"optimizer": offload.optimizer_path, "param": offload.param_path}
    on_disk = [name for name in paths if getattr(offload, f"{name}_device") == "nvme"]
    for name in on_disk:
        if paths[name] is None:
            findings.problems.append(f'{section}_{name}.nvme_path: missing; "nvme" needs the folder of the disk')
    if len(on_disk) == 2 and None not in paths.values() and len(set(paths.values())) == 2:
        findings.problems.append(
            f"{section}_param.nvme_path: one folder serves both, got {offload.param_path!r} and, in offload_optimizer, "
            f"{offload.optimizer_path!r}; give the same"
        )


def _check_network(sections: Mapping[str, Any], findings: Findings) -> None:
    """What travels must have a use at this stage, and the shards have one size."""
    network, stage = sections["network"], sections["zero"].stage
    for key, is_on, least in (
        ("mics_shard_size", network.mics_shard_size > 0, 1),
        ("replicate_size", network.replicate_size > 1, 1),
        ("zero_quantized_gradients", network.quantized_gradients, 1),
        ("zero_quantized_weights", network.quantized_weights, 3),
        ("zero_quantized_nontrainable_weights", network.quantized_frozen_weights, 3),
        ("zero_hpz_partition_size", network.hpz_partition_size > 1, 3),
    ):
        if is_on and stage < least:
            findings.problems.append(
                f"zero_optimization.{key}: expected stage {least} or above, got stage {stage}, which has no use for "
                "it; raise the stage, or take the key out"
            )
    if network.mics_shard_size > 0 and network.replicate_size > 1:
        findings.problems.append(
            "zero_optimization.mics_shard_size and zero_optimization.replicate_size both say how many copies there "
            "are; give one of them"
        )


def _check_tensor(tensor: TensorConfig, findings: Findings) -> None:
    """Three keys say one thing; those that are given must say the same."""
    counts = {
        "tp_size": tensor.tp_size,
        "autotp_size": tensor.autotp_size,
        "tp.tp_size": tensor.nested_tp_size,
    }
    given = {f"tensor_parallel.{key}": num_ranks for key, num_ranks in counts.items() if num_ranks > 1}
    if len(set(given.values())) > 1:
        told = ", ".join(f"{key} is {num_ranks}" for key, num_ranks in given.items())
        findings.problems.append(f"{told}: these keys all give the number of tensor-parallel ranks; keep one of them")


def _check_pipeline(pipeline: PipelineConfig, findings: Findings) -> None:
    """Two keys say how layers are dealt out; one that is given must be known, and two must say the same."""
    given = {"partition": pipeline.partition, "partition_method": pipeline.partition_method}
    for key, method in given.items():
        if method is not None and method not in _PARTITIONS and not method.startswith("type:"):
            findings.problems.append(
                f'pipeline.{key}: expected one of {", ".join(_PARTITIONS)}, or "type:" and a pattern of class names, '
                f"got {method!r}"
            )
    if None not in given.values() and len(set(given.values())) > 1:
        findings.problems.append(
            f"pipeline.partition is {pipeline.partition!r}, pipeline.partition_method is "
            f"{pipeline.partition_method!r}: both say how layers are dealt out; keep one of them"
        )


def _check_sequence(sections: Mapping[str, Any], findings: Findings) -> None:
    """What does not go together yet with ranks that share sequences."""
    num_ranks, network = sections["sequence"].num_ranks, sections["network"]
    beside = {
        "pipeline.stages": sections["pipeline"].num_stages > 1,
        "zero_optimization.zero_hpz_partition_size": network.hpz_partition_size > 1,
        "zero_optimization.mics_hierarchical_params_gather": network.hierarchical,
    }
    for key, is_on in beside.items():
        if num_ranks > 1 and is_on:
            findings.problems.append(
                f"sequence_parallel_size: {num_ranks} together with {key} is not available yet; take one of them out"
            )


def _check_experts(sections: Mapping[str, Any], findings: Findings) -> None:
    """Each expert is split as every other layer is."""
    experts, num_tensor = sections["experts"], sections["tensor"].num_ranks
    if experts.enabled and experts.tensor_size not in (1, num_tensor):
        findings.problems.append(
            f"expert_parallel.expert_tensor_parallel_size: expected 1 or {num_tensor}, the number of tensor-parallel "
            f"ranks, got {experts.tensor_size}: experts are split like all other layers; take the key out"
        )
    if experts.autoep_size > 1 and not experts.enabled:
        findings.notes.append("expert_parallel.autoep_size: takes effect with expert_parallel.enabled")


def _with_batch(config: Config, data_world: int | None, findings: Findings) -> Config:
    """Solves the triangle as far as it can be; a key of it that is wrong by itself is not reported twice."""
    if any(problem.startswith(_BATCH_KEYS) for problem in findings.problems):
        return config
    problem = check_numbers(config.batch, data_world)
    if problem is None and data_world is not None:
        try:
            return dataclasses.replace(config, batch_sizes=solve_batch(config.batch, data_world))
        except ConfigError as error:
            problem = str(error)
    if problem is not None:
        findings.problems.append(problem)
    return config


def _raise_problems(findings: Findings, label: str, drop_in: bool) -> None:
    problems = findings.problems
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    raise (DropInConfigError if drop_in else ConfigError)(f"{label} has {count}:\n{listed}")
