"""``deepspeed.checkpointing``: recomputation by DeepSpeed's names, with one set of settings for the whole process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardcore import activation
from shardcore.config import ActivationConfig, load_config
from shardcore.deepspeed.random_tracker import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh, axis_of_group

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


class _State:
    """What :func:`configure` has set."""

    def __init__(self) -> None:
        self.is_configured = False
        self.axis: Axis | None = None
        self.options: dict[str, Any] = {}
        self.settings = activation.Settings()

    def change(self, **options: Any) -> None:
        """Use these options from now on. Regions that run already keep theirs."""
        merged = {**self.options, **options}
        partition = self.axis if merged.get("partition") else None
        self.settings = activation.Settings(**{**merged, "partition": partition})
        self.options = merged


_state = _State()


def configure(
    mpu_: Any,
    deepspeed_config: dict[str, Any] | str | os.PathLike[str] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how :func:`checkpoint` works in this process. Not collective; all ranks pass the same.

    Args:
        mpu_: tells the tensor-parallel ranks: a :class:`shardcore.Mesh`, an object with
            ``get_tensor_model_parallel_group()`` or ``get_model_parallel_group()``, or None for none.
        deepspeed_config: a configuration file or dict, whose section ``activation_checkpointing`` is read.
        partition_activations: each tensor-parallel rank keeps a part of each input; nothing where there is one rank.
        contiguous_checkpointing: inputs lie in one buffer.
        num_checkpoints: inputs that the buffer has room for.
        checkpoint_in_cpu: inputs rest in host memory.
        synchronize: wait for the device before and after each call.
        profile: log the time of each call.

    An argument that is not None wins over the file.

    Raises:
        ConfigError: a value, the file, or ``mpu_`` is not what it must be; ``partition_activations`` without ``mpu_``.
    """
    section = ActivationConfig() if deepspeed_config is None else load_config(deepspeed_config).activation
    options = {
        "partition": _first(partition_activations, section.partition),
        "contiguous": _first(contiguous_checkpointing, section.contiguous),
        "num_checkpoints": _first(num_checkpoints, section.num_checkpoints),
        "offload": "cpu" if _first(checkpoint_in_cpu, section.cpu) else None,
        "synchronize": _first(synchronize, section.synchronize),
        "profile": _first(profile, section.profile),
        "policy": "selective" if section.policy == "selective" else "full",
    }
    axis = _axis_of(mpu_)
    if options["partition"] and axis is None:
        raise ConfigError(
            "checkpointing.configure(partition_activations=True): mpu_=None does not say among which ranks; pass a "
            "shardcore.Mesh, or an object with get_tensor_model_parallel_group()"
        )
    _state.axis = axis
    _state.change(**options)
    _state.is_configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _state.is_configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``, keep its inputs, and call it again in backward for everything else; see
    :func:`shardcore.activation.checkpoint`. It is never re-entrant. Collective over the tensor-parallel ranks in
    backward, if inputs are partitioned.

    Inside a region that is recomputed already (a block that ``initialize`` wrapped, say) it is a plain call.
    """
    if activation.is_inside():
        return function(*args, **kwargs)
    return activation.checkpoint_with(_state.settings, function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Accepted between iterations. Nothing is left to reset: buffers and host memory are free again as soon as the
    graph that used them is gone.
    """


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change ``partition_activations`` alone.

    Raises:
        ConfigError: :func:`configure` was not told the tensor-parallel ranks.
    """
    if partition_activation and _state.axis is None:
        raise ConfigError("partition_activations_in_checkpoint(True): call configure(mpu_, ...) with the ranks before")
    _state.change(partition=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Change ``num_checkpoints`` alone; a ConfigError unless it is at least 1."""
    _state.change(num_checkpoints=nlayers)


def _first(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given


def _axis_of(mpu: Any) -> Axis | None:
    if mpu is None:
        return None
    if isinstance(mpu, Mesh):
        return mpu["tp"]
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        group = getattr(mpu, name, None)
        if group is not None:
            return axis_of_group("tp", group())
    raise ConfigError(
        f"checkpointing.configure(mpu_={type(mpu).__name__}): expected a shardcore.Mesh, or an object with "
        "get_tensor_model_parallel_group() or get_model_parallel_group()"
    )
