"""``deepspeed.ops.adagrad``."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from shardcore.deepspeed.ops.arguments import refuse_amsgrad, state_dtype
from shardcore.optim import CPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """:class:`shardcore.optim.CPUAdagrad`.

    Args:
        fp32_optimizer_states: False keeps the state in bf16, rounded stochastically.

    Raises:
        ConfigError: ``amsgrad``.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        dtype = state_dtype(fp32_optimizer_states)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps, state_dtype=dtype)
