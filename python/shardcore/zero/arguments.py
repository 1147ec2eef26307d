"""What ``shard`` is given: of the right kind, buildable, and the same on every rank."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.protocols import find_context_axis, find_expert_axis, find_experts, find_pipeline, find_tensor_axis
from shardcore.zero.construction import find_piece

if TYPE_CHECKING:
    from torch import nn

    from shardcore.mesh import Axis, Mesh
    from shardcore.zero.communication import Communication
    from shardcore.zero.policy import Policy, Precision
    from shardcore.zero.prefetch import PrefetchLimits

T = TypeVar("T")


def expect(name: str, value: object, kind: type[T]) -> T:
    """``value``, if it is of this class.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"shard({name}={value!r}): expected a {kind.__name__}")
    return value


def check_init(init: object) -> None:
    """Raise unless ``init`` can be called.

    Raises:
        ConfigError: it cannot.
    """
    if init is not None and not callable(init):
        raise ConfigError(
            f"shard(init={init!r}): expected a function of a module that initialises the module's own parameters and "
            "buffers, or None for the modules' own way"
        )


def check_arguments(
    module: nn.Module,
    mesh: Mesh,
    policy: Policy,
    precision: Precision,
    communication: Communication,
    prefetch: PrefetchLimits | None,
    segment_nbytes: int | None,
) -> None:
    """Raise unless something uses the mesh's axes and all ranks give the same. Collective over the data-parallel axis.

    Raises:
        ConfigError: the mesh has an axis that nothing uses yet, or a tensor axis over which the module is not split; or
            a buffer shares the memory of a parameter.
        RankMismatchError: ranks give different settings; the message names one, and both values.
    """
    _check_shared_memory(module)
    _check_context_axis(module, mesh)
    _check_tensor_axis(module, mesh)
    _check_stages(module, mesh)
    _check_expert_axis(module, mesh)
    settings = {
        "stage": policy.stage,
        "precision": precision,
        "communication": communication,
        "prefetch": prefetch,
        "segment_nbytes": segment_nbytes,
    }
    comm.agree_on_settings("shardcore.shard(...)", settings, mesh.data_axes().every)


def _check_shared_memory(module: nn.Module) -> None:
    """Parameters move to memory of their own. A buffer or an attribute (``layer.weight.detach()``) that shares theirs
    would keep the values of now.
    """
    params = sorted((*_memory(param), name) for name, param in module.named_parameters() if _has_memory(param))
    for path, part in module.named_modules():
        for key, tensor in {**vars(part), **part._buffers}.items():
            if not _has_memory(tensor) or f"{key}_orig" in part._parameters:  # spectral_norm sets it anew in forward
                continue
            start, stop = _memory(tensor)
            near = params[: bisect_left(params, (stop,))]
            owner = next((name for first, last, name in reversed(near) if start < last), None)
            if owner is not None:
                kind = "buffer" if key in part._buffers else "attribute"
                raise ConfigError(
                    f"{kind} {f'{path}.{key}'.lstrip('.')!r} shares the memory of parameter {owner!r}, which sharding "
                    "moves: it would keep the values of now. Take it from the parameter in forward, or clone it"
                )


def _has_memory(value: object) -> bool:
    """Whether it is a plain tensor that holds values here."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    tensor: Any = value
    is_here = tensor.layout == torch.strided and not tensor.is_meta and find_piece(tensor) is None
    return is_here and tensor.numel() > 0 and tensor.data_ptr() != 0


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [start, stop) between its first element and behind its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_context_axis(module: nn.Module, mesh: Mesh) -> None:
    """The model must know that the ranks of the mesh's context axis have parts of its sequences."""
    axis, expected = find_context_axis(module), mesh["cp"]
    if axis is None and expected.size > 1:
        raise ConfigError(
            f"the mesh has cp={expected.size}, but {type(module).__name__} does not share sequences: those ranks would "
            "repeat each other's work. Call shardcore.tensor.context_parallel(model, mesh) before shardcore.shard, or "
            "make the mesh without cp"
        )
    _check_same_ranks("cp", f"{type(module).__name__} shares its sequences", axis, expected)


def _check_expert_axis(module: nn.Module, mesh: Mesh) -> None:
    """The experts must lie over the mesh's expert axis, and over no other."""
    axis, expected = find_expert_axis(module.parameters()), mesh["ep"]
    if axis is None and expected.size > 1:
        raise ConfigError(
            f"the mesh has ep={expected.size}, but {type(module).__name__} has no experts that lie over it. Call "
            "shardcore.tensor.parallelize(model, mesh) before shardcore.shard, or make the mesh without ep"
        )
    _check_same_ranks("ep", f"the experts of {type(module).__name__} lie", axis, expected)
    for name, param in module.named_parameters():
        if find_experts(param) is not None and (param.is_meta or find_piece(param) is not None):
            raise ConfigError(
                f"parameter {name!r} of experts was built on the meta device or inside sharded_init, whose parameters "
                "are the same on all data-parallel ranks, and these are not: build the experts outside of it"
            )


def _check_stages(module: nn.Module, mesh: Mesh) -> None:
    """The model must be cut into the stages that the mesh has ranks for."""
    if mesh["pp"].size > 1 and find_pipeline(module) is None:
        raise ConfigError(
            f"the mesh has pp={mesh['pp'].size}, but {type(module).__name__} is not one rank's stages: those ranks "
            "would repeat each other's work. Give shardcore.shard a shardcore.pipeline.Pipeline(model, mesh, ...), or "
            "make the mesh without pp"
        )


def _check_tensor_axis(module: nn.Module, mesh: Mesh) -> None:
    """The model must be split over the mesh's tensor axis, and over no other."""
    axis, expected = find_tensor_axis(module.parameters()), mesh["tp"]
    if axis is None and expected.size > 1:
        raise ConfigError(
            f"the mesh has tp={expected.size}, but {type(module).__name__} is not split over it: those ranks would "
            "repeat each other's work. Call shardcore.tensor.parallelize(model, mesh) before shardcore.shard, or make "
            "the mesh without tp"
        )
    _check_same_ranks("tp", f"{type(module).__name__} is split", axis, expected)


def _check_same_ranks(name: str, what: str, axis: Axis | None, expected: Axis) -> None:
    """What was spread over an axis before lies over the ranks that the mesh has there."""
    if axis is not None and axis.ranks != expected.ranks:
        raise ConfigError(
            f"{what} over the ranks {list(axis.ranks)}, but the mesh given to shardcore.shard has {name} over "
            f"{list(expected.ranks)}: give both the same mesh"
        )
