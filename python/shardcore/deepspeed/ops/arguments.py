"""Arguments that the optimizers of ``deepspeed.ops`` share."""

from __future__ import annotations

from shardcore.errors import ConfigError


def state_dtype(fp32_optimizer_states: bool) -> str:
    """What ``fp32_optimizer_states`` means to shardcore's optimizers: bf16 states are rounded stochastically."""
    return "fp32" if fp32_optimizer_states else "bf16"


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """No kernel keeps the largest second moment.

    Raises:
        ConfigError: it is asked for.
    """
    if amsgrad:
        raise ConfigError(f"{name}(amsgrad=True) is not supported; use torch.optim.AdamW(..., amsgrad=True)")
