"""Updates on the CPU: which kernel stands for which torch optimizer, and the memory of its states."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardcore.errors import ConfigError
from shardcore.offload import Offload, take_pool
from shardcore.optim.cpu import CPUOptimizer
from shardcore.optim.cpu_rules import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW
from shardcore.protocols import ShardedRoot

if TYPE_CHECKING:
    from shardcore.mesh import Axis

_Kernel = type[CPUAdam] | type[CPUSGD] | type[CPUAdagrad]
_KERNELS: dict[type[torch.optim.Optimizer], _Kernel] = {
    torch.optim.AdamW: CPUAdamW,
    torch.optim.Adam: CPUAdam,
    torch.optim.SGD: CPUSGD,
    torch.optim.Adagrad: CPUAdagrad,
}
_NOT_IN_KERNELS = ("amsgrad", "capturable", "differentiable")


def common_offload(roots: Sequence[ShardedRoot]) -> Offload:
    """The offload that all modules of one optimizer share.

    Raises:
        ConfigError: they differ.
    """
    found: list[Offload] = [root.offload for root in roots]
    if any(offload != found[0] for offload in found):
        raise ConfigError(
            f"the modules of one optimizer were sharded with different offload settings ({found[0]} and others); give "
            "all of them the same, or make an optimizer for each"
        )
    return found[0]


def on_host(
    inner: torch.optim.Optimizer, roots: Sequence[ShardedRoot], tensors: Sequence[Sequence[torch.Tensor]] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the CPU kernels that gives what ``inner`` gives, over the same tensors; ``inner`` itself where
    there is none: torch then updates tensors in host memory, by any element-wise rule.

    Args:
        tensors: for each parameter group those that are updated there; None means all.
    """
    kernel = _KERNELS.get(type(inner))
    if kernel is CPUAdam and all(group.get("decoupled_weight_decay") for group in inner.param_groups):
        kernel = CPUAdamW
    # Of all groups, since this rank may have no element of one, and all ranks must choose alike.
    dtypes = {group.master.dtype for root in roots for group in root.groups if group.trainable}
    asks_more = any(group.get(option) for group in inner.param_groups for option in _NOT_IN_KERNELS)
    if kernel is None or asks_more or dtypes != {torch.float32}:
        return inner
    known = {"params", *inspect.signature(kernel).parameters}
    groups = [{key: value for key, value in group.items() if key in known} for group in inner.param_groups]
    for group, params in zip(groups, tensors if tensors is not None else (), strict=tensors is not None):
        group["params"] = list(params)
    return kernel(groups)


def allocate_states(inner: torch.optim.Optimizer, axis: Axis) -> None:
    """Make all states of a CPU kernel's optimizer in one pool of host memory. torch's own make theirs themselves, when
    a parameter is first updated. Collective over ``axis``.

    Raises:
        StorageError: the machine has less; the message has the sum.
    """
    if not isinstance(inner, CPUOptimizer):
        return
    wanted: list[tuple[str, int, torch.dtype]] = []
    inner.complete_states(lambda name, numel, dtype: wanted.append((name, numel, dtype)))
    pool = take_pool(wanted, axis, pin=False)
    inner.complete_states(lambda name, numel, dtype: pool.tensor(numel, dtype))


def writes_parameters(inner: torch.optim.Optimizer, group: Any) -> bool:
    """Whether the kernel that updates the group's masters also writes its 16-bit parameters, in the same pass."""
    return (
        isinstance(inner, CPUOptimizer)
        and group.has_masters
        and not group.rests_on_disk  # a few of them are in memory at a time
        and group.master.dtype == torch.float32
        and group.own.dtype in (torch.bfloat16, torch.float16)
        and group.own.device.type == "cpu"
    )
