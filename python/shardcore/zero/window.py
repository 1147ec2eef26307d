"""From one update to the next: which backward reduces, in which order groups are reduced, and what is left at the end.

All ranks reduce all trainable groups in one fixed order, the reverse of the order of units. A group whose gradients are
complete waits for those before it, as in DDP; whatever is missing when backward ends counts as zero. So ranks may use
different units, and each backward still runs the same collectives everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcore import comm
from shardcore.errors import StateError
from shardcore.mesh import Axis
from shardcore.zero.gradients import GroupGradients
from shardcore.zero.group import ShardGroup
from shardcore.zero.policy import Policy


class Window:
    """The gradients of all groups between two updates.

    Stages 2 and 3 reduce in every backward. Stages 0 and 1 keep gradients whole, so that one reduction in the last
    backward is enough: the engine says which that is. In a hand-written loop stage 0 reduces in every backward, as DDP
    does, since ``param.grad`` is read after it; stage 1 learns from the window before which backward is the last (its
    first window reduces at the boundary).
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        reduce_order: Sequence[int],
        data_axis: Axis,
        policy: Policy,
        program: comm.Program,
    ) -> None:
        self._groups = [group for group in groups if group.trainable]
        self._order = [groups[i] for i in reduce_order]
        self._axis = data_axis
        self._program = program
        self._keeps_whole = not policy.shards_grads
        self._reduce_once = policy.shards_states and not policy.shards_grads
        self._expected: int | None = None
        self._late: set[ShardGroup] = set()
        self.last_backward: bool | None = None
        """Set by an engine that knows whether the coming backward is the window's last; None: decide here."""
        self.suspended = False
        """Inside ``no_sync``: backwards only add up locally."""
        self.num_backwards = 0
        """Backwards since the last update."""
        self.num_backwards_in_micro_batch = 0
        """Backwards since the engine last ended a micro-batch."""
        self.reducing = False
        self.has_reduced = False
        """Gradients of this window are sums over ranks already, so that one rank alone may not drop them."""
        self.is_clear = False
        """They have been dropped since the last update."""
        self._ready: set[ShardGroup] = set()
        self._next = 0

    def begin_backward(self, unused: Sequence[ShardGroup]) -> None:
        """A backward starts; ``unused`` are groups that took no part in the forward before it."""
        self.num_backwards += 1
        self.num_backwards_in_micro_batch += 1
        self.reducing = self._reduces_now()
        self._next = 0
        self._ready = {group for group in unused if group not in self._late}
        self._launch()

    def mark_ready(self, group: ShardGroup) -> None:
        """All gradients of the group in this backward have arrived."""
        if group not in self._late:
            self._ready.add(group)
            self._launch()

    def note_gradient(self, group: ShardGroup) -> None:
        """A gradient arrives; one that comes after its group was reduced is kept for the boundary, and remembered."""
        if self.reducing and group in self._ready and self._position(group) < self._next:
            self._late.add(group)

    def end_backward(self) -> None:
        """Reduce the groups that have not been, with zeros for what is missing."""
        if self.reducing:
            self._ready.update(self._order)
            self._launch()
        self.reducing = False

    def finish(self) -> list[list[bool]]:
        """Reduce what is left over, wait for everything; per group and parameter: has any rank a gradient?
        Collective.
        """
        for group in self._groups:
            _grads(group).finish_reduce()
            _grads(group).heed_params()
        present, unreduced = self._agree()
        for group in self._order:
            if unreduced[group]:
                _grads(group).start_reduce()
        for group in self._order:
            _grads(group).finish_reduce()
            _grads(group).settle()
            _grads(group).expose()
        # A second optimizer of the model finishes a window that the first has finished.
        self._expected, self.num_backwards = self.num_backwards or self._expected, 0
        self.has_reduced = self.is_clear = False
        return present

    def flush(self) -> None:
        """Reduce what backwards left on the ranks, before the window's end. Collective over the data-parallel axis."""
        for group in self._groups:
            _grads(group).finish_reduce()
        _, unreduced = self._agree()
        for group in self._order:
            if unreduced[group]:
                _grads(group).start_reduce()
        for group in self._order:
            _grads(group).finish_reduce()
            _grads(group).expose()

    def clear(self, set_to_none: bool) -> None:
        """Forget all gradients."""
        self.has_reduced, self.is_clear = False, True
        for group in self._groups:
            _grads(group).clear(set_to_none)

    def reset_running(self) -> None:
        """Leave a backward that has ended, or failed."""
        self.reducing = False
        self._ready = set()
        self._next = 0

    def _reduces_now(self) -> bool:
        if self.suspended:
            return False
        if self.last_backward is not None and self._keeps_whole:
            return self.last_backward
        return not self._reduce_once or self.num_backwards == self._expected

    def _launch(self) -> None:
        if not self.reducing:
            return
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            if self._next:
                # At most one reduction in flight: its buffer is free before the next one is needed.
                _grads(self._order[self._next - 1]).finish_reduce()
            _grads(self._order[self._next]).start_reduce()
            self.has_reduced = True
            self._next += 1

    def _position(self, group: ShardGroup) -> int:
        return self._order.index(group)

    def _agree(self) -> tuple[list[list[bool]], dict[ShardGroup, bool]]:
        """One small all-reduce: who has gradients, what is unreduced, and whether the ranks ran the same program."""
        comm.settle()
        present = [flag for group in self._groups for flag in _grads(group).present]
        local = [_grads(group).has_local for group in self._groups]
        if self._axis.size > 1:
            digest = list(comm.program_digest().to_bytes(4, "big"))
            flags = torch.tensor([*present, *local, *digest, *(255 - byte for byte in digest)], dtype=torch.uint8)
            agreed = comm.max_over_ranks(flags, self._axis, comm.STEP, self._program).tolist()
            low = [255 - byte for byte in agreed[-4:]]
            comm.raise_on_program_mismatch(self._axis, equal=agreed[-8:-4] == low)
            present = [bool(flag) for flag in agreed[: len(present)]]
            local = [bool(flag) for flag in agreed[len(present) : -8]]
        flags_of = iter(present)
        return [[next(flags_of) for _ in group.slots] for group in self._groups], dict(
            zip(self._groups, local, strict=True)
        )


def _grads(group: ShardGroup) -> GroupGradients:
    if group.grads is None:  # the window holds trainable groups only
        raise StateError(f"group {group.name!r} is frozen and has no gradients")
    return group.grads
