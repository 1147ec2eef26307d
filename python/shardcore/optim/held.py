"""What one optimizer holds of its models: the groups it updates, and its own part of their gradients.

Several optimizers may share a model, each with parameters of its own. A group may then hold parameters of several; each
optimizer measures, scales and clears only its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shardcore.errors import ConfigError
from shardcore.optim.loss_scale import ConstantScale
from shardcore.protocols import LossScale, ParameterSlot, ShardedGroup, ShardedOptimizerMark, ShardedRoot


class Held:
    """The parameters of one optimizer, in the order of the plan."""

    def __init__(self, roots: Sequence[ShardedRoot], options_of: Mapping[nn.Parameter, int]) -> None:
        self.params = frozenset(options_of)
        self.slots: dict[ShardedRoot, list[ParameterSlot]] = {root: [] for root in roots}
        """Trainable ones, by model."""
        self.groups: list[ShardedGroup] = []
        """Trainable groups that hold any of them."""
        self._ranges: dict[ShardedRoot, list[tuple[ShardedGroup, int, int | None]]] = {root: [] for root in roots}
        for root in roots:
            for group in root.groups:
                mine = [slot for slot in group.slots if slot.param in self.params]
                if group.trainable and mine:
                    self.groups.append(group)
                    self.slots[root].extend(mine)
                    self._ranges[root].extend(_ranges(group, mine))

    def grads(self, root: ShardedRoot) -> list[torch.Tensor]:
        """The reduced gradients on this rank: the whole shard of a group where all of it is held."""
        return [group.grad_shard[start:stop] for group, start, stop in self._ranges[root]]

    def counted_grads(
        self, root: ShardedRoot, counted: Callable[[nn.Parameter], Sequence[tuple[int, int]]]
    ) -> list[torch.Tensor]:
        """As :meth:`grads`, without what another rank of a pipeline or of the tensor axis counts.

        Args:
            counted: the ranges of a flattened parameter that this rank counts.
        """
        found = []
        for slot in self.slots[root]:
            start, stop, offset = slot.group.local_range(slot)
            for first, last in counted(slot.param):
                first, last = max(first, start), min(last, stop)
                if first < last:
                    found.append(slot.group.grad_shard[offset + first - start : offset + last - start])
        return found

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Scale the gradients in place, on whichever device they are."""
        found: dict[torch.device, float | torch.Tensor] = {}
        for grad in [grad for root in self._ranges for grad in self.grads(root)]:
            if grad.device not in found:
                found[grad.device] = factor.to(grad.device) if isinstance(factor, torch.Tensor) else factor
            grad.mul_(found[grad.device])

    def with_gradient(self, roots: Sequence[ShardedRoot]) -> dict[nn.Parameter, bool]:
        """Finish the window: for each parameter, whether any rank has a gradient. Collective."""
        found = {}
        for root in roots:
            groups = [group for group in root.groups if group.trainable]
            for group, flags in zip(groups, root.finish_gradients(), strict=True):
                found.update(
                    {s.param: flag for s, flag in zip(group.slots, flags, strict=True) if s.param in self.params}
                )
        return found


def join(optimizer: ShardedOptimizerMark, roots: Sequence[ShardedRoot]) -> None:
    """Enter the optimizer at its models. One over the same parameters takes the place of an earlier one.

    Raises:
        ConfigError: another optimizer shares the model, and their loss scales could come to differ.
    """
    for root in roots:
        params = [slot.param for group in root.groups if group.trainable for slot in group.slots]
        mine = [param for param in params if optimizer.holds(param)]
        others = [other for other in root.live_optimizers() if not any(other.holds(param) for param in mine)]
        scales: list[LossScale] = [each.loss_scale for each in (optimizer, *others)]
        if others and (len({scale.scale for scale in scales}) > 1 or not all(map(_is_constant, scales))):
            raise ConfigError(
                "a second optimizer of a model whose loss is scaled: the scales of the two could come to differ, while "
                "a backward has one. Use one optimizer with several parameter groups, or a fixed loss_scale for both"
            )
        root.optimizers = [weakref.ref(other) for other in (*others, optimizer)]


def _is_constant(scale: LossScale) -> bool:
    return isinstance(scale, ConstantScale)


def _ranges(group: ShardedGroup, mine: Sequence[ParameterSlot]) -> list[tuple[ShardedGroup, int, int | None]]:
    """The whole shard where all parameters are held, else the pieces of those that are."""
    if len(mine) == len(group.slots):
        return [(group, 0, None)]
    pieces = [group.local_range(slot) for slot in mine]
    return [(group, offset, offset + stop - start) for start, stop, offset in pieces]
