"""Blocks of a model that are recomputed in each backward, whoever calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from shardcore.activation.caches import without_empty_caches
from shardcore.activation.region import is_inside, run
from shardcore.activation.settings import Settings, partition_axis
from shardcore.blocks import Units, choose_blocks
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import splits_sequence

_log = logging.getLogger("shardcore")

Model = TypeVar("Model", bound=nn.Module)


class RecomputedForward:
    """Stands in for the ``forward`` of one module. Hooks of the module stay outside: they run once, and a sharded unit
    is gathered before its recomputation as before any other backward.
    """

    def __init__(self, module: nn.Module, settings: Settings, name: str) -> None:
        self._module = module
        self.instead_of: Callable[..., Any] | None = module.__dict__.get("forward")
        """What stood there before on this module itself; None where the class's method did."""
        self.settings = settings
        """How the module is recomputed."""
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, to be run again in backward."""
        module = self._module
        forward = self.instead_of or partial(type(module).forward, module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if getattr(module, "gradient_checkpointing", False):
            raise StateError(_two_ways(self._name))
        cleared = without_empty_caches(module, args, kwargs)
        # What an outer region recomputes need not be recomputed once more in it.
        if cleared is None or (not torch.compiler.is_compiling() and is_inside()):
            return forward(*args, **kwargs)
        return run(forward, *cleared, self.settings, module=module, name=self._name)


def wrap(
    model: Model,
    units: Units = "auto",
    policy: str = "full",
    offload: str | None = None,
    partition: bool | Axis | Mesh = False,
    *,
    contiguous: bool = False,
    num_checkpoints: int | None = None,
    synchronize: bool = False,
    profile: bool = False,
) -> Model:
    """Recompute the blocks of a model in backward. Not collective.

    Gradients stay the same to the last bit, and random numbers are repeated. Names of parameters and modules stay, so
    do hooks, which run once. Calls without gradients run as before. A block that is called inside another recomputed
    region is a part of that one.

    Args:
        model: changed in place; before or after ``shardcore.shard``.
        units: the blocks: ``"auto"`` (the same that ``shardcore.shard`` takes, as far as they consist of several
            modules), a list of modules, classes or class names, or a function ``(name, module) -> bool``.
        policy: ``"full"`` keeps each block's inputs; ``"selective"`` also the outputs of its matrix products and fused
            attention, and recomputes what is cheap.
        offload: ``"cpu"``: inputs that take a gradient rest in host memory (pinned where there is CUDA).
        partition: the tensor-parallel axis, ``mesh["tp"]``, each rank of which keeps a part of such inputs; True is the
            axis that the model is split over. Blocks then have collectives over it in backward. Where activations are
            split along the sequence already, a block's input is a part as it is, and this changes nothing.
        contiguous: such inputs lie in one buffer on the device.
        num_checkpoints: inputs that the buffer has room for; None is the number of blocks.
        synchronize: wait for the device before and after each block.
        profile: log the time of each block (of the host, unless ``synchronize``).

    Returns:
        The model.

    Raises:
        ConfigError: no such blocks, policy or home; ``partition=True`` where no tensor-parallel axis is known.
        StateError: blocks are wrapped already, or recomputed by the model itself.
    """
    blocks = _blocks(model, units)
    _refuse_other_ways(model)
    settings = Settings(
        policy=policy,
        offload=offload,
        partition=None if splits_sequence(model) else partition_axis(partition, model),
        contiguous=contiguous,
        num_checkpoints=len(blocks) if num_checkpoints is None else num_checkpoints,
        synchronize=synchronize,
        profile=profile,
    )
    for name, block in blocks.items():
        block.forward = RecomputedForward(block, settings, name)
    return model


def unwrap(model: Model) -> Model:
    """Take :func:`wrap` back: blocks keep their activations again. Returns the model.

    Raises:
        StateError: something else stands in for a block's ``forward`` now; the message names the block.
    """
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, RecomputedForward):
            del module.forward
            if forward.instead_of is not None:
                module.forward = forward.instead_of
        elif _is_around_ours(forward):
            raise StateError(
                f"{name!r} cannot be unwrapped: its forward was replaced by {forward!r} after "
                "shardcore.activation.wrap; take that back first"
            )
    return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether any block of the model is recomputed by :func:`wrap`."""
    return any(isinstance(module.__dict__.get("forward"), RecomputedForward) for module in model.modules())


def recomputes_by_itself(model: nn.Module) -> bool:
    """Whether the model's own code recomputes blocks: Hugging Face's ``gradient_checkpointing_enable`` was called."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _blocks(model: nn.Module, units: Units) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"activation.wrap: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = choose_blocks(model, units)
    if units == "auto":  # a layer by itself keeps its input anyway, and a block inside another is a part of it
        inside = {part for module in chosen for part in module.modules() if part is not module}
        chosen = {module for module in chosen - inside if next(module.children(), None) is not None}
    found = {name: module for name, module in model.named_modules() if module in chosen}
    if not found:
        raise ConfigError(
            f"activation.wrap(units={units!r}): {type(model).__name__} has no such blocks; name their classes, as in "
            'units=["Block"], or give a function (name, module) -> bool'
        )
    return found


def _refuse_other_ways(model: nn.Module) -> None:
    wrapped = [n for n, m in model.named_modules() if isinstance(m.__dict__.get("forward"), RecomputedForward)]
    if wrapped:
        raise StateError(
            f"{wrapped[0]!r} is wrapped already (and {len(wrapped) - 1} others): call "
            "shardcore.activation.unwrap(model) before wrapping with other settings"
        )
    if recomputes_by_itself(model):
        raise StateError(_two_ways(type(model).__name__))


def _two_ways(name: str) -> str:
    return (
        f"{name} has gradient_checkpointing on, so that its blocks would be recomputed twice: turn that off "
        "(model.gradient_checkpointing_disable(), activation_checkpointing_disable() in newer transformers), or do not "
        "wrap it"
    )


def _is_around_ours(forward: Any) -> bool:
    """Whether a function that replaced a module's forward still calls ours."""
    seen: list[Any] = [forward, getattr(forward, "__wrapped__", None), getattr(forward, "func", None)]
    seen += list(getattr(forward, "args", None) or ())
    return any(isinstance(each, RecomputedForward) for each in seen)
