"""``deepspeed.utils``: values of single parameters of a sharded model, under DeepSpeed's names. At every stage.

What is collective, and what None means, stands at the native functions (:mod:`shardcore.zero`,
:mod:`shardcore.optim`), which these are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardcore import optim, zero
from shardcore.deepspeed.utils import zero_to_fp32

__all__ = [
    "get_z3_leaf_modules",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "zero_to_fp32",
]

safe_get_full_fp32_param = zero.full_master
safe_set_full_fp32_param = zero.set_full_master
safe_get_local_fp32_param = zero.local_master
safe_set_local_fp32_param = zero.set_local_master
safe_get_full_grad = zero.full_grad
safe_set_full_grad = zero.set_full_grad
safe_get_local_grad = zero.local_grad
safe_set_local_grad = zero.set_local_grad
set_z3_leaf_modules = zero.set_leaf_modules
unset_z3_leaf_modules = zero.unset_leaf_modules
get_z3_leaf_modules = zero.get_leaf_modules


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One state of a parameter (``"exp_avg"``, ...), whole; None before its first update. Collective."""
    return optim.full_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set one state of a parameter on all ranks. Collective."""
    optim.set_full_state(param, optim_state_key, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of this rank's piece of a state, 1-D. Not collective."""
    return optim.local_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's piece of a state. Not collective."""
    optim.set_local_state(param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each whole gradient by ``update_func(grad, param)``; parameters without one are left out. Collective."""
    zero.update_full_grads(param_list, update_func)
