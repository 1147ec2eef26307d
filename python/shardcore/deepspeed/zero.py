"""``deepspeed.zero``: models built in pieces, and parameters made whole for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from shardcore import zero
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]

register_external_parameter = zero.register_external_parameter
unregister_external_parameter = zero.unregister_external_parameter

_log = logging.getLogger("shardcore")
_INSTEAD = {
    "mpu": "pass mesh= to shardcore.sharded_init",
    "sequence_data_parallel_group": "pass mesh= to shardcore.sharded_init",
    "zero_param_parallel_group": "set zero_hpz_partition_size in the configuration",
    "zero_quantized_weights": "set it in the configuration",
    "zero_quantized_nontrainable_weights": "they travel in full",
    "param_swapper": "parameters are not kept on disk while a model is built",
    "tensor_overrides": "build under torch.device(...) instead",
}
"""Arguments of :class:`Init` that are refused, and what to do or know instead."""


class Init:
    """A context in which models are sharded as they are built: :func:`shardcore.sharded_init` by DeepSpeed's signature.
    Collective over all ranks, which join the job here if they have not yet.

    Args:
        module: a model that exists already; its parameters shrink now, without entering the context.
        data_parallel_group: a process group of all ranks, or None.
        remote_device: None, "cpu" or the name of the device; parameters stay where the model creates them.
        config_dict_or_path, config: not read here; ``initialize`` checks it and casts to its dtype.
        enabled: False does nothing.
        dtype: floating parameters are created and initialised in it; None leaves them as the model has them.
        mem_efficient_linear, pin_memory: no effect.
        sequence_data_parallel_group, mpu, zero_param_parallel_group, zero_quantized_weights,
            zero_quantized_nontrainable_weights, param_swapper, tensor_overrides: refused.

    Raises:
        ConfigError: an argument that would change what is built; all are named at once.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        given = locals()
        problems = [f"{name} is not supported: {instead}" for name, instead in _INSTEAD.items() if given[name]]
        if remote_device not in (None, "none", "cpu") and not str(remote_device).startswith("cuda"):
            problems.append(f"remote_device={remote_device!r} is not supported: leave it out")
        if config is not None and config_dict_or_path is not None:
            problems.append("config and config_dict_or_path: give one of them")
        if problems:
            raise ConfigError(f"zero.Init: {'; '.join(problems)}")
        if not mem_efficient_linear or pin_memory:
            _log.info("zero.Init: mem_efficient_linear and pin_memory have no effect")
        self._dtype = dtype
        self._context: AbstractContextManager[None] | None = None
        self._mesh = _mesh_of(data_parallel_group) if enabled else None
        if module is not None and self._mesh is not None:
            with zero.sharded_init(self._mesh, dtype, module):
                pass

    def __enter__(self) -> Self:
        if self._mesh is not None:
            self._context = zero.sharded_init(self._mesh, self._dtype)
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(kind, error, trace)


def _mesh_of(group: Any) -> Mesh:
    mesh = Mesh()
    if group is not None and group.size() != mesh.world:
        raise ConfigError(
            f"zero.Init(data_parallel_group=<group of {group.size()} ranks>) in a job of {mesh.world}: only a group of "
            "all ranks is supported; for another, pass mesh= to shardcore.sharded_init"
        )
    return mesh


@contextmanager
def GatheredParameters(  # noqa: N802  # DeepSpeed's name
    params: nn.Parameter | Iterable[nn.Parameter] | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which ``params`` are whole on every rank; edits by ``modifier_rank`` reach all ranks. Collective on
    entering and leaving. See :func:`shardcore.zero.gathered`.

    They may be of a sharded model, or of one that was built under :class:`Init`; other parameters pass through.

    Raises:
        StateError: on leaving, if a parameter was written to and ``modifier_rank`` is None, or one that is not in
            ``params``; the message names it, on every rank, and the write is undone.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    chosen = list(params) if enabled else []
    with zero.gathered_pieces(chosen, modifier_rank), zero.gathered(chosen, modifier_rank=modifier_rank):
        yield
