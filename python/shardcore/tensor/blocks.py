"""What a split block does around its layers: random numbers of its own, and the sequence gathered and split.

A block's inside begins where its module is called and ends at its last, row-parallel layer: what follows in the same
module (dropout of the residual, say) is replicated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore.errors import ConfigError
from shardcore.mesh import Axis
from shardcore.tensor.columns import gather_input
from shardcore.tensor.functions import gather_from_ranks, split_to_ranks
from shardcore.tensor.randomness import RankStream, drop_rates, is_random

SEQUENCE_DIM = 1
"""Activations of blocks are [batch, sequence, features]."""


def use_own_randomness(block: nn.Module, first: nn.Module, last: nn.Module | None, axis: Axis) -> None:
    """Between the calls of ``first`` and of ``last``, or the end of ``block``, draw from this rank's stream."""
    stream, rates = RankStream(axis.rank), drop_rates(block)
    if not rates:
        return

    @private.not_traced
    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if is_random(block, rates):
            stream.enter(_first_tensor(args, kwargs).device)

    @private.not_traced
    def leave(*_: Any) -> None:
        stream.leave()

    first.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave, always_call=True)
    if last is not None:
        last.register_forward_pre_hook(leave)


def gather_sequence_for(block: nn.Module, axis: Axis, unit: str) -> None:
    """Give ``block`` the whole sequence, of which its caller has a part."""

    @private.not_traced
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _replace_first(args, kwargs, lambda x: gather_input(x, axis, SEQUENCE_DIM, unit))

    block.register_forward_pre_hook(before, with_kwargs=True)


def split_sequence_between(blocks: list[tuple[str, nn.Module]], axis: Axis) -> None:
    """From the first block's input to the last one's output, each rank has a part of the sequence; inside each block
    it draws from a stream of its own. Blocks may run in different stages of a pipeline.
    """
    (first_name, first), (last_name, last) = blocks[0], blocks[-1]

    @private.not_traced
    def split(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = _first_tensor(args, kwargs)
        if x.dim() != 3:
            raise ConfigError(
                f"sequence parallelism: the input of {first_name} has shape {tuple(x.shape)}, expected [batch, "
                "sequence, features]"
            )
        return _replace_first(args, kwargs, lambda x: split_to_ranks(x, axis, SEQUENCE_DIM, first_name))

    @private.not_traced
    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather_from_ranks(output[0], axis, SEQUENCE_DIM, last_name), *output[1:])
        return gather_from_ranks(output, axis, SEQUENCE_DIM, last_name)

    first.register_forward_pre_hook(split, with_kwargs=True)
    for _, block in blocks:
        use_own_randomness(block, block, None, axis)
    last.register_forward_hook(gather)


def _first_tensor(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    found = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    if found is None:
        raise ConfigError("a split block was called without a tensor")
    return found


def _replace_first(args: Any, kwargs: dict[str, Any], change: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments with the activation changed: the first positional one, or ``hidden_states``."""
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    name = next((n for n in ("hidden_states", *kwargs) if isinstance(kwargs.get(n), torch.Tensor)), None)
    if name is None:
        raise ConfigError("a split block was called without a tensor")
    return args, {**kwargs, name: change(kwargs[name])}
