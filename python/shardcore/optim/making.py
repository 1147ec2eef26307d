"""What a sharded optimizer is made of, and what may not change about it afterwards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore.errors import ConfigError
from shardcore.optim.loss_scale import ConstantScale, DynamicScale
from shardcore.optim.targets import Options
from shardcore.protocols import LossScale, ShardedRoot


def have_members(groups: Sequence[Options], members: Sequence[Sequence[nn.Parameter]]) -> bool:
    """Whether the groups hold these parameters, in this order."""
    pairs = [(group["params"], known) for group, known in zip(groups, members, strict=False)]
    return len(groups) == len(members) and all(
        len(now) == len(known) and all(map(operator.is_, now, known)) for now, known in pairs
    )


def build_inner(
    build: Callable[[list[Options]], torch.optim.Optimizer], groups: list[Options]
) -> torch.optim.Optimizer:
    """The inner optimizer over 1-D pieces, or a ConfigError with what it says against them or its options."""
    try:
        with private.without_loading_compiler():
            return build(groups)
    except TypeError as error:  # an option that it does not have
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{error} (parameters reach a sharded optimizer in pieces, as vectors)") from error


def default_scale(roots: Sequence[ShardedRoot]) -> LossScale:
    """What the precision of the roots asks for; roots of one optimizer share one scale."""
    for root in roots:
        asked = root.precision.loss_scale
        if isinstance(asked, (int, float)):
            return ConstantScale(float(asked))
        is_half = any(
            slot.param.dtype == torch.float16 for group in root.groups if group.trainable for slot in group.slots
        )
        if asked == "dynamic" or is_half:
            return DynamicScale()
    return ConstantScale()


def has_other_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else than a scheduler has put another ``step`` on the instance."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")
