"""`Config`: everything a configuration file decides, checked and resolved."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcore.config.batch import BatchSizes, solve_batch
from shardcore.config.explain import explain, to_json
from shardcore.config.sections import (
    ActivationConfig,
    BatchConfig,
    BF16Config,
    CheckpointConfig,
    DataConfig,
    DataTypesConfig,
    ExpertConfig,
    FloatDtype,
    FP16Config,
    GradientConfig,
    LeafConfig,
    LoggingConfig,
    NetworkConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    SchedulerConfig,
    SequenceConfig,
    TensorConfig,
    ZeroConfig,
)
from shardcore.errors import ConfigError, DropInConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class IgnoredKey:
    """A key that was accepted and changes nothing."""

    path: str
    """Full dotted path."""
    shown: str
    """The value as it stands in the file, cut short."""
    reason: str
    """Why it changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A checked configuration. `shardcore.config.load_config` makes one."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """The batch sizes the file gives."""
    batch_sizes: BatchSizes | None = None
    """The solved batch triangle; None as long as the data-parallel world is not known."""
    gradients: GradientConfig = field(default_factory=GradientConfig)
    """Clipping, averaging and communication of gradients."""
    optimizer: OptimizerConfig | None = None
    """The optimizer to build; None leaves it to the caller."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build; None leaves it to the caller."""
    fp16: FP16Config = field(default_factory=FP16Config)
    """Float16 and its loss scale."""
    bf16: BF16Config = field(default_factory=BF16Config)
    """Bfloat16."""
    data_types: DataTypesConfig = field(default_factory=DataTypesConfig)
    """Accumulation dtype."""
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """Sharding."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Homes outside the device."""
    leaves: LeafConfig = field(default_factory=LeafConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Shards and copies over the ranks, and how they travel."""
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    """Recomputation."""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """The split of layers over ranks."""
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    """Sequences shared by ranks."""
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    """Experts spread over ranks."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """The stages."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training loader."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Progress lines and timers."""
    drop_in: bool = False
    """Whether DeepSpeed's defaults hold where they differ, and errors are also AssertionErrors."""
    label: str = "config"
    """Where the configuration came from, for messages."""
    given: frozenset[str] = frozenset()
    """Dotted paths of the honoured keys that the file sets."""
    ignored: tuple[IgnoredKey, ...] = ()
    """The keys that were accepted and change nothing."""
    notes: tuple[str, ...] = ()
    """What the user should be told once: unknown top-level keys, "auto" values and what they stand for."""

    @property
    def param_dtype(self) -> FloatDtype:
        """Dtype of the parameters that forward and backward see."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    def resolve_batch(self, data_world: int) -> BatchSizes:
        """Solves the batch triangle for ``data_world`` data-parallel ranks.

        Raises:
            ConfigError: the numbers do not fit together; in drop-in mode the error is also an AssertionError.
        """
        try:
            return solve_batch(self.batch, data_world)
        except ConfigError as error:
            raise (DropInConfigError if self.drop_in else ConfigError)(f"{self.label}: {error}") from None

    def explain(self) -> str:
        """A text for people: each value and where it comes from, ignored keys with reasons, and the notes."""
        return explain(self)

    def to_json(self) -> str:
        """The honoured keys with their resolved values, as a configuration file that loads to the same values."""
        return to_json(self)
