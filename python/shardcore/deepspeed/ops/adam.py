"""``deepspeed.ops.adam``."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from shardcore.deepspeed.ops.arguments import refuse_amsgrad, state_dtype
from shardcore.errors import ConfigError
from shardcore.optim import CPUAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(CPUAdam):
    """:class:`shardcore.optim.CPUAdam`, or ``CPUAdamW`` in ``adamw_mode``.

    Args:
        fp32_optimizer_states: False keeps states in bf16, rounded stochastically.

    Raises:
        ConfigError: ``amsgrad``, or no ``bias_correction``.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check("DeepSpeedCPUAdam", amsgrad, bias_correction)
        self.decoupled = adamw_mode
        dtype = state_dtype(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, eps, weight_decay, state_dtype=dtype)


class FusedAdam(torch.optim.Adam):
    """torch's fused Adam, or AdamW in ``adam_w_mode``.

    Raises:
        ConfigError: ``amsgrad``, or no ``bias_correction``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check("FusedAdam", amsgrad, bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adam_w_mode)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget gradients; None means what ``set_grad_none`` said."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)


def _check(name: str, amsgrad: bool, bias_correction: bool) -> None:
    refuse_amsgrad(name, amsgrad)
    if not bias_correction:
        raise ConfigError(f"{name}(bias_correction=False) is not supported: moments are always corrected")
