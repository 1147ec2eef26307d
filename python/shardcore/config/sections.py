"""The configuration as the library uses it: frozen sections with a docstring per field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FloatDtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How many samples make a step, as far as the file says."""

    train_batch_size: int | None = None
    """Samples per optimizer step over the whole job; None is worked out from the others."""
    micro_batch_size: int | None = None
    """Samples per rank per forward and backward; None is worked out from the others."""
    accumulation_steps: int | None = None
    """Micro-batches per optimizer step; None is worked out from the others, else 1."""
    managed: bool = True
    """Whether the engine counts micro-batches; if not, every ``step()`` call is a boundary."""
    data_parallel_size: int | None = None
    """Data-parallel ranks the file was written for; a run with another number is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientConfig:
    """What happens to gradients between backward and update."""

    clipping: float | None = None
    """Largest global norm; None is no clipping."""
    communication_dtype: FloatDtype | None = None
    """Dtype in which gradients travel between ranks; None follows the accumulation dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer the library builds."""

    type: str
    """Name of a torch optimizer class; DeepSpeed's names are already translated."""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The learning-rate schedule the library builds."""

    type: str
    """Name of a schedule of `shardcore.optim.lr_schedules` or of a torch scheduler class."""
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FP16Config:
    """Training in float16 with float32 master weights and a loss scale."""

    enabled: bool = False
    """Whether parameters and activations are float16."""
    loss_scale: float = 0.0
    """A fixed loss scale; 0 lets it adapt."""
    initial_scale_power: int = 16
    """An adaptive scale starts at 2 to this power."""
    loss_scale_window: int = 1000
    """Steps without overflow after which an adaptive scale doubles."""
    hysteresis: int = 2
    """Overflows that are tolerated before an adaptive scale halves."""
    consecutive_hysteresis: bool = False
    """Whether a step without overflow makes the tolerance whole again."""
    min_loss_scale: float = 1.0
    """An adaptive scale never goes below this."""

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self.loss_scale == 0.0

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return 2.0**self.initial_scale_power if self.dynamic else self.loss_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class BF16Config:
    """Training in bfloat16 with float32 master weights."""

    enabled: bool = False
    """Whether parameters and activations are bfloat16."""
    check_grad_overflow: bool = True
    """Whether a step whose gradients hold an inf or NaN is skipped on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTypesConfig:
    """Dtypes that do not follow from the precision mode alone."""

    param_dtype: FloatDtype | None = None
    """What the file says parameters are; it must agree with the fp16 and bf16 sections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How parameters, gradients and optimizer states are sharded over data-parallel ranks."""

    stage: int = 0
    """0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    reduce_bucket_size: int = 500_000_000
    """Elements of gradient that are reduced in one collective, at most (a single parameter may exceed it)."""
    prefetch_bucket_size: int = 50_000_000
    """Stage 3 gathers this many elements of parameters ahead of their use, at most."""
    max_live_parameters: int = 1_000_000_000
    """Elements of parameters that stage 3 holds gathered, at most, unless more are in use at one moment."""
    max_reuse_distance: int = 1_000_000_000
    """Stage 3 keeps parameters gathered until their next use only if fewer elements are used in between."""
    param_persistence_threshold: int = 100_000
    """Groups of parameters of up to this many elements stay gathered to the end of the step at stage 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """What rests in host memory or on a disk instead of on the device."""

    optimizer_device: Literal["none", "cpu", "nvme"] = "none"
    """Where master weights and optimizer states rest; the CPU updates them unless it is "none"."""
    optimizer_path: str | None = None
    """Folder of the disk for "nvme"."""
    optimizer_pin: bool = True
    """Whether their host memory is registered with CUDA."""
    ratio: float = 1.0
    """The part of all elements whose states rest there and which the CPU updates; the device updates the others."""
    buffer_count: int = 4
    """For how many tiles of states on a disk host memory has room."""
    param_device: Literal["none", "cpu", "nvme"] = "none"
    """Where the shards of parameters rest at stage 3."""
    param_path: str | None = None
    """Folder of the disk for "nvme"."""
    param_max_in_cpu: int | None = None
    """Elements of parameters on their way from and to the disk that host memory has room for, on each rank; at least
    the largest shard. None leaves it to the library.
    """
    param_pin: bool = True
    """Whether their host memory is registered with CUDA."""
    sub_group_size: int | None = None
    """Elements of a shard that move to and from a disk as one, at most; None leaves it to the library."""
    block_size: int = 1 << 20
    """Bytes of one transfer to or from the disk, at most; whole pages."""
    queue_depth: int = 32
    """Transfers that are under way at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafConfig:
    """Modules that are one unit with everything in them, whichever of their parts a rank uses."""

    classes: tuple[str, ...] = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
    """Names of their classes. Of others than these, at least one must be in the model."""
    names: tuple[str, ...] = ()
    """Their full names."""
    name_suffixes: tuple[str, ...] = ()
    """What their full names end with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Over which ranks shards are cut, and in what form they travel."""

    mics_shard_size: int = -1
    """Ranks over which one copy of the model is sharded (MiCS); -1 or 0: all of them, or as ``replicate_size`` says."""
    replicate_size: int = 1
    """Copies of the sharded model."""
    replicate_inside: bool = False
    """Whether the copies lie inside the node and the shards across nodes."""
    hierarchical: bool = False
    """Whether shards cross nodes and are handed on inside each in two steps."""
    hpz_partition_size: int = 1
    """Neighbouring ranks over which stage 3 cuts a second shard for backward; 1 keeps none."""
    quantized_weights: bool = False
    """Whether stage 3 gathers parameters in int8."""
    quantized_frozen_weights: bool = False
    """Whether stage 3 gathers parameters that are not trained in int8."""
    quantized_gradients: bool = False
    """Whether gradients are reduced in int4, with error feedback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationConfig:
    """Which activations are computed again in backward, and where inputs rest meanwhile."""

    policy: Literal["none", "full", "selective"] | None = None
    """What blocks keep; None is "full" where one of the next three asks for a place, and "none" elsewhere."""
    partition: bool = False
    """Whether each tensor-parallel rank keeps a part of a block's input."""
    cpu: bool = False
    """Whether inputs rest in host memory."""
    contiguous: bool = False
    """Whether inputs lie in one buffer on the device."""
    units: tuple[str, ...] = ()
    """Class names of the blocks; none are the repeated blocks of the model."""
    num_checkpoints: int | None = None
    """Inputs that the buffer has room for; None is the number of blocks."""
    synchronize: bool = False
    """Whether the device is waited for before and after each block."""
    profile: bool = False
    """Whether the time of each block is logged."""
    interval: int = 0
    """Layers of a pipeline's stage that are recomputed together; 0 leaves it to the pipeline."""

    @property
    def effective_policy(self) -> Literal["none", "full", "selective"]:
        """The policy, where the file names none."""
        return self.policy or ("full" if self.partition or self.cpu or self.contiguous else "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorConfig:
    """Over how many ranks each layer is split; the file has three keys for it."""

    tp_size: int = 1
    """``tensor_parallel.tp_size``; 0 is 1, here and below."""
    autotp_size: int = 0
    """``tensor_parallel.autotp_size``."""
    nested_tp_size: int = 1
    """``tensor_parallel.tp.tp_size``."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the tensor axis."""
        return max(1, self.tp_size, self.autotp_size, self.nested_tp_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig:
    """Over how many ranks each sequence is shared."""

    num_ranks: int = 1
    """Ranks of the context axis; 1 shares nothing."""
    attention: Literal["ulysses", "ring"] = "ulysses"
    """How a model of Hugging Face attends over them: each rank with some of the heads, or keys and values go round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """Over how many ranks experts are spread."""

    enabled: bool = False
    """Whether they are at all."""
    autoep_size: int = 1
    """Ranks among which each has other experts."""
    tensor_size: int = 1
    """Ranks that split each expert's weights, where the file says it: 1, or as many as split every layer."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the expert axis."""
        return self.autoep_size if self.enabled else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How the layers are cut into stages; micro-batches are the accumulation steps."""

    num_stages: int = 1
    """Ranks of the pipeline axis; 1 cuts nothing."""
    partition: str | None = None
    """"uniform", "parameters" (or "best"), "type:REGEX"; the file has two keys for it, of which this is the older."""
    partition_method: str | None = None
    """The same. None is what the other says, else "parameters"."""
    schedule: str = "1f1b"
    """A name of ``shardcore.plan.pipeline_schedule``."""
    num_chunks: int | None = None
    """Stages on each rank; None is the schedule's own number."""

    @property
    def effective_partition(self) -> str:
        """How layers are dealt out, whichever key says it."""
        found = self.partition_method or self.partition or "parameters"
        return "parameters" if found == "best" else found


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The loader that the engine builds from ``training_data``."""

    drop_last: bool = False
    """Whether samples that do not fill a last batch are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What a run says about itself."""

    steps_per_print: int | None = None
    """Optimizer steps between two progress lines; None prints none."""
    wall_clock_breakdown: bool = False
    """Whether the time of each phase of a step is measured and printed."""
    dump_state: bool = False
    """Whether the whole configuration is printed on rank 0 at the start."""
    level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Level of the library's logger; None leaves it as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How checkpoints are saved."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = "Warn"
    """What happens where ranks save under different tags; unless it fails, the first rank's is used on all."""


SECTIONS: dict[str, type] = {
    "batch": BatchConfig,
    "gradients": GradientConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "fp16": FP16Config,
    "bf16": BF16Config,
    "data_types": DataTypesConfig,
    "zero": ZeroConfig,
    "offload": OffloadConfig,
    "leaves": LeafConfig,
    "network": NetworkConfig,
    "activation": ActivationConfig,
    "tensor": TensorConfig,
    "sequence": SequenceConfig,
    "experts": ExpertConfig,
    "pipeline": PipelineConfig,
    "data": DataConfig,
    "logging": LoggingConfig,
    "checkpoint": CheckpointConfig,
}
"""The sections of `Config` by name; a key of the table targets "section.field"."""


def default_of(target: str) -> Any:
    """The default of a field named as "section.field"; `dataclasses.MISSING` if it has none."""
    section, name = target.split(".")
    return next(entry.default for entry in fields(SECTIONS[section]) if entry.name == name)
