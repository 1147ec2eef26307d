"""What would go wrong silently on a split model, and is refused instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import StateError
from shardcore.mesh import Axis
from shardcore.protocols import find_slot, splits_of
from shardcore.tensor.randomness import drop_rates, generator_of, is_random


def guard(model: nn.Module, axis: Axis) -> None:
    """Refuse copies of the model, clipping by a part's norm, and a first call that differs between ranks."""
    object.__setattr__(model, "__deepcopy__", _refuse_copy)
    object.__setattr__(model, "__reduce_ex__", _refuse_copy)
    private.before_any_clipping(_refuse_clipping_of_parts)
    compare_first_call(model, axis)


def _refuse_copy(_: Any) -> NoReturn:
    raise StateError(
        "a tensor-parallel model cannot be copied or pickled (copy.deepcopy, AveragedModel, torch.save(model), ...), "
        "since this rank has only a part: copy it before shardcore.tensor.parallelize, or use model.state_dict(), "
        "which gathers whole parameters on all ranks"
    )


def _refuse_clipping_of_parts(params: Sequence[torch.Tensor]) -> None:
    for param in params:
        if any(pieces.axis.size > 1 for pieces in splits_of(param)):
            slot = find_slot(param)
            which = f" (such as that of {slot.name!r})" if slot is not None else ""
            raise StateError(
                f"torch.nn.utils was asked to clip gradients of a tensor-parallel model{which}, of which this rank has "
                "a part: its norm would be that of the part. Use shardcore.shard(model, mesh, stage=0 or more) and "
                "shardcore.optimizer(..., max_grad_norm=...), which clip by the norm of the whole model"
            )


def compare_first_call(model: nn.Module, axis: Axis, *, with_stream: bool = True) -> None:
    """Ranks of a tensor axis must work on the same data, and draw the same random numbers between split blocks; those
    of a context axis (without the stream) on parts of the same data.
    """
    rates = drop_rates(model)

    @private.not_traced
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        handle.remove()
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        told = {name: [list(value.shape), comm.fingerprint(value)] for name, value in tensors.items()}
        if with_stream and is_random(module, rates):
            device = next((value.device for value in tensors.values()), torch.device("cpu"))
            told["the stream of random numbers"] = [[], comm.fingerprint(generator_of(device).get_state())]
        comm.agree_on_settings(
            f"the first call of a model that is split over {axis.name!r}, whose ranks must read the same data"
            + (" and be seeded alike," if with_stream else ","),
            told,
            axis,
        )

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
