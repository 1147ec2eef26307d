"""What a rank joins for ranks on other branches (:mod:`shardcore.comm.branches`): gathers and reductions of units that
it does not use itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardcore import comm
from shardcore.zero.aliases import reclaim, release
from shardcore.zero.resting import RestingShard
from shardcore.zero.state import ParamState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardcore.mesh import Axis
    from shardcore.protocols import ParameterSlot
    from shardcore.zero.gradients import GroupGradients


class JoinsReductions:
    """Part of :class:`shardcore.zero.gradients.GroupGradients`."""

    name: str
    _full: torch.Tensor
    _own: torch.Tensor
    was_reduced: bool
    _host_is_current: bool
    _reduce_dtype: torch.dtype
    route: comm.Route
    _shard_axis: Axis
    _replicate_axis: Axis

    @property
    def can_be_joined(self) -> bool:
        """Whether a reduction is one step over all ranks, in full."""
        return self._replicate_axis.size == 1 and self.route.is_plain and not self.route.rounds_reductions

    @property
    def _device_shard(self) -> torch.Tensor:
        """[shard_numel] this rank's reduced gradient."""
        raise NotImplementedError

    def finish_reduce(self) -> None:
        """Wait for a reduction under way and take its result."""
        raise NotImplementedError

    def join_reduce(self) -> None:
        """Add what other ranks reduce to this rank's shard; this rank has nothing to add to theirs. Collective over the
        shard axis.
        """
        self.finish_reduce()
        zeros = torch.zeros(self._full.shape, dtype=self._reduce_dtype, device=self._full.device)
        comm.reduce_shards(zeros, self._shard_axis, self.name).wait()
        start = self._own.storage_offset()
        reduced = zeros[start : start + self._own.numel()]
        shard = self._device_shard
        if self.was_reduced:
            shard.add_(reduced.to(shard.device))
        else:
            shard.copy_(reduced)
        self.was_reduced = True
        self._host_is_current = False


class JoinsGathers(RestingShard):
    """Part of :class:`shardcore.zero.group.ShardGroup`."""

    name: str
    full: torch.Tensor
    slots: Sequence[ParameterSlot]
    state: ParamState
    grads: GroupGradients | None
    shard_axis: Axis
    _slice: slice
    nbytes: int
    _handle: comm.Handle | None

    def join_gather(self) -> None:
        """Give this rank's shard to ranks that gather the parameters, whatever they are here. Collective."""
        if self._handle is not None:  # an earlier gather, into the same memory
            self._handle.wait()
            self._handle = None
        is_away = self.state is ParamState.SHARDED and self.shard_axis.size > 1
        if is_away:
            reclaim(self.full, self.nbytes)
        self.full[self._slice].copy_(self.own_to_read)
        self._note_device_read()
        comm.gather_shards(self.full, self.shard_axis, self.name).wait()
        if is_away:
            release(self.full, self.slots, self.name, was_shown=False)

    def join_reduce(self) -> None:
        """Take part in a reduction of the gradients of other ranks. Collective."""
        if self.grads is not None:
            self.grads.join_reduce()
