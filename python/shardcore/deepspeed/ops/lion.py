"""``deepspeed.ops.lion``."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from shardcore.deepspeed.ops.arguments import state_dtype
from shardcore.optim import CPULion

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(CPULion):
    """:class:`shardcore.optim.CPULion`.

    Args:
        fp32_optimizer_states: False keeps the momentum in bf16, rounded stochastically.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay, state_dtype=state_dtype(fp32_optimizer_states))
