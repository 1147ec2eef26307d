"""What training scripts ask a DeepSpeed engine, under its names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardcore.config import BatchSizes, Config
    from shardcore.mesh import Mesh
    from shardcore.optim import ShardedOptimizer


class Queries:
    """Read-only answers of an engine; nothing here changes state or communicates."""

    config: Config
    mesh: Mesh
    optimizer: ShardedOptimizer | None
    _batch: BatchSizes

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.mesh.device

    @property
    def global_rank(self) -> int:
        """This process's rank in the job."""
        return self.mesh.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """Processes in the job."""
        return self.mesh.world

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.data_world

    @property
    def mp_world_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.mesh["tp"].size

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped for non-finite gradients."""
        return self.optimizer.num_skipped_steps if self.optimizer is not None else 0

    @property
    def basic_optimizer(self) -> Any:
        """The torch optimizer that runs on this rank's shards."""
        return self.optimizer.inner if self.optimizer is not None else None

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def get_type(self) -> list[str]:
        """Class name of the optimizer, for each parameter group."""
        return [type(self.basic_optimizer).__name__ for _ in self._groups()]

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's mean gradient, unscaled and before clipping; None before the first step."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last boundary updated the parameters (False after an overflow)."""
        return self.optimizer is not None and self.optimizer.step_was_applied

    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by; 1 without fp16."""
        return self.optimizer.loss_scale.scale if self.optimizer is not None else 1.0

    def train_batch_size(self) -> int:
        """Samples per optimizer step over the whole job."""
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batch.accumulation_steps

    def gradient_clipping(self) -> float:
        """Largest global gradient norm; 0 is no clipping."""
        return self.config.gradients.clipping or 0.0

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.config.zero.stage

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.bf16.enabled

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.config.fp16.enabled and self.config.fp16.dynamic

    def steps_per_print(self) -> int | None:
        """Optimizer steps between progress lines."""
        return self.config.logging.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether phases are timed."""
        return self.config.logging.wall_clock_breakdown

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []
