"""``deepspeed.utils``: values of single parameters of a sharded model at every stage, the log, an endless loader.

What is collective, and what None means, stands at the native functions (:mod:`shardcore.zero`,
:mod:`shardcore.optim`), which these are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardcore import optim, zero
from shardcore.comm import torch_call
from shardcore.deepspeed.utils import zero_to_fp32

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
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

logger = logging.getLogger("shardcore")

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


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: those in ``ranks``, all for ``[-1]``, the first for None. Not collective."""
    rank = torch_call("get_rank")() if torch_call("is_initialized")() else 0
    chosen = ranks or [0]
    if -1 in chosen or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """An iterator that starts its loader anew whenever it is through.

    Raises:
        StopIteration: the loader is empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
