"""The way of gradients out of the stages: into their groups, over tied weights, and over data-parallel ranks.

Sharded parameters have a group with one door, ``group.grads.accumulate``; autograd hooks use it too. Parameters of a
Pipeline that is not sharded keep ``param.grad`` as torch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardcore import comm
from shardcore.mesh import Axis
from shardcore.protocols import find_slot


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """A parameter of this rank of which other ranks of the pipeline hold copies."""

    name: str
    param: nn.Parameter
    axis: Axis
    """The ranks that hold it; the first of them counts it."""


class Gradients:
    """What the executor tells about gradients: a weight gradient is there, a stage is done, ties may be summed."""

    def __init__(self, root: Any, stages: Mapping[int, Sequence[nn.Parameter]], shared: Sequence[SharedWeight]) -> None:
        self.root = root
        """What ``zero.shard`` left on the pipeline, or None."""
        self._shared = [weight for weight in shared if weight.axis.size > 1 and weight.param.requires_grad]
        self._groups: dict[Any, set[int]] = {}
        for stage, params in stages.items():
            for slot in filter(None, map(find_slot, params)):
                if slot.group.trainable:
                    self._groups.setdefault(slot.group, set()).add(stage)
        tied = [slot for slot in (find_slot(weight.param) for weight in self._shared) if slot is not None]
        self._waits_for_ties = {slot.group for slot in tied}
        self._ties_done = self._are_summed = self._is_suspended = False
        self._reached: dict[Any, set[int]] = {}
        self._last: Any = None

    def begin(self) -> None:
        """A step starts: backwards only add up until a stage is done."""
        if self._are_summed:
            self._count_summed_once()
        self._is_suspended = self.root is not None and self.root.window.suspended
        self._ties_done = not self._shared
        self._reached = {group: set() for group in self._groups}
        self._last = None
        if self.root is not None:
            self.root.window.suspended = True
            self.root.loss_is_scaled = True

    def end(self) -> None:
        """The step is over, or has failed."""
        if self.root is not None:
            self.root.window.suspended = self._is_suspended
            self.root.loss_is_scaled = False
            self.root.num_micro_batches = self.root.accumulation  # the factors of the losses are all there is

    def accumulate(self, grads: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add weight gradients of one micro-batch; those of one parameter are summed first, as autograd does."""
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for param, grad in grads:
            sums[param] = sums[param] + grad if param in sums else grad
        for param, grad in sums.items():
            slot = find_slot(param)
            if slot is not None:
                slot.group.grads.accumulate(slot.index, grad)
            elif param.grad is None:
                param.grad = grad.detach()
            else:
                param.grad.add_(grad)

    def stage_done(self, stage: int) -> None:
        """Reduce what only this stage was still missing in. Collective over the data-parallel axis."""
        for group, stages in self._groups.items():
            if stage in stages:
                self._reached[group].add(stage)
                self._reduce_if_ready(group)

    def sum_ties(self) -> None:
        """Sum the gradients of shared weights over the ranks that hold copies. Collective over these.

        Inside ``no_sync`` they are left for a step outside.
        """
        if self._is_suspended or self._ties_done:
            return
        handles = [
            comm.all_reduce(_local_sum(weight.param), weight.axis, f"tied {weight.name}") for weight in self._shared
        ]
        for handle in handles:
            handle.wait()
        self._ties_done = self._are_summed = True
        for group in self._groups:
            self._reduce_if_ready(group)

    def finish(self) -> None:
        """The program is over: what it had no place for, and at stage 0 the whole gradients on the parameters.

        There autograd itself adds to what ``param.grad`` shows, so no reduction may be under way after this.
        """
        self.sum_ties()
        for group in self._groups:
            if group.grads.exposed:
                group.grads.finish_reduce()
                group.grads.expose()

    def _count_summed_once(self) -> None:
        """Gradients of an earlier call, which are the sum over all copies already, must not be summed again: of those
        that have not been cleared since, only the first rank keeps its.
        """
        self._are_summed = False
        for weight in self._shared:
            if weight.axis.rank == 0:
                continue
            slot = find_slot(weight.param)
            if slot is not None:
                slot.group.grads.empty_whole(slot.index)
            elif weight.param.grad is not None:
                weight.param.grad.zero_()

    def _reduce_if_ready(self, group: Any) -> None:
        if (
            self._is_suspended
            or self._reached[group] != self._groups[group]
            or (group in self._waits_for_ties and not self._ties_done)
        ):
            return
        self._reached[group] = set()
        if self._last is not None:
            self._last.grads.finish_reduce()  # at most one under way: its buffer is free before the next one starts
        group.grads.start_reduce()
        self._last = group


def _local_sum(param: nn.Parameter) -> torch.Tensor:
    """The whole gradient of this rank, in place; zeros where it has none."""
    slot = find_slot(param)
    if slot is not None:
        found: torch.Tensor = slot.group.grads.local_sum(slot.index)
        return found
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
