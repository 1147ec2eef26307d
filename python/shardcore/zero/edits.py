"""What is written into the whole parameters of a group from outside: noticed, and taken into shard and masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.zero.guard import replaced_data
from shardcore.zero.resting import RestingShard
from shardcore.zero.state import ParamState

if TYPE_CHECKING:
    from shardcore.mesh import Axis
    from shardcore.protocols import ParameterSlot
    from shardcore.zero.gathering import Gathering
    from shardcore.zero.saved import VersionCounters


class Edits(RestingShard):
    """Mixed into the group."""

    name: str
    full: torch.Tensor
    slots: Sequence[ParameterSlot]
    root: Any
    state: ParamState
    releases: bool
    shard_axis: Axis
    num_edits = 1
    """How often masters on a disk were to be taken from the parameters anew; the first time is at the start."""
    _frees: bool
    """Whether the whole parameters leave no memory behind when they are released."""
    _slice: slice
    _gathering: Gathering
    versions: VersionCounters
    _versions: list[int]
    _memory_was_taken = False
    """Code outside takes memory of the parameters in a form whose writes leave no trace."""
    _was_shown = False
    """A context has shown the whole parameters since they were gathered."""

    def complete(self, *, exact: bool = True) -> None:
        """Wait for a gather under way, or gather."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Release what is gathered."""
        raise NotImplementedError

    def local_range(self, slot: ParameterSlot) -> tuple[int, int, int]:
        """(start, stop, shard_offset): this rank's piece of the parameter."""
        raise NotImplementedError

    def check_storage(self) -> None:
        """Raise if a parameter no longer lives in the flat buffer, so that updates would not reach it.

        Raises:
            StateError: its ``.data`` was replaced, perhaps by others of another shape; the message names it.
        """
        if self.state is not ParamState.UNSHARDED:
            return
        base, itemsize = self.full.data_ptr(), self.full.element_size()
        with private.without_torch_function():
            resized = [s for s in self.slots if s.param.shape != s.shape]
            moved = [s for s in self.slots if s.numel and s.param.data_ptr() != base + s.offset * itemsize]
        if resized:
            raise StateError(_resized(resized[0]))
        if moved:
            raise StateError(replaced_data(moved[0].name))

    def repoint(self) -> None:
        """Make parameters whose data were replaced views of the flat buffer again, in the shapes that they had."""
        with torch.no_grad(), private.without_torch_function():
            for slot in self.slots:
                view = self.full[slot.offset : slot.offset + slot.numel].view(slot.shape)
                param = slot.param
                if (param.data_ptr(), param.dtype, param.shape) != (view.data_ptr(), view.dtype, view.shape):
                    slot.param.data = view

    def adopt_edits(self) -> None:
        """Take values that the user wrote into whole parameters (``load_state_dict``, ``copy_``) into shard and
        masters.
        """
        self.root.about_to_change()
        if self._frees:
            self.own_to_fill.copy_(self.full[self._slice])
        self.invalidate_copies()
        self._refresh_masters(slice(None))
        self.note_versions()

    def adopt_edits_if_any(self) -> None:
        """As :meth:`adopt_edits`, if a parameter was, or may have been, written to since the last time."""
        if not self.has_masters or self.releases or "lp_params" in self.root.offloaded:
            return
        if self._memory_was_taken or self._versions != self.versions.now():
            self.complete()
            self.adopt_edits()

    def keep_edits_of_use(self) -> None:
        """What a forward wrote to its parameters (``weight.clamp_()``) outlasts the gathered copy, as it does where
        parameters are whole; ranks must write the same, as for every edit.

        Raises:
            StateError: the gathered copy is rounded, or a parameter's data were replaced; the message says how to write
                instead.
        """
        try:
            self.check_storage()
        except StateError:
            self.repoint()
            raise
        # A copy whose memory was taken may have been read only: a rounded one must not become the shard, and contexts
        # see to writes themselves.
        may_differ = self._memory_was_taken and not self._gathering.is_rounded and not self._was_shown
        if self._versions == self.versions.now() and not may_differ:
            return
        if self._gathering.is_rounded:
            raise StateError(
                f"parameters of unit {self.name!r} were written to in a forward or backward, for which they are "
                "gathered in rounded form (Communication(gather=...)): write in summon(model, writeback=True) instead"
            )
        self.adopt_edits()

    def rewrite(self, slot: ParameterSlot, read: Callable[[int, int, torch.Tensor], None]) -> None:
        """Replace this rank's piece of a parameter: ``read(start, stop, out)`` writes elements [start, stop) of the
        flattened parameter into ``out``. The parameter shows them after :meth:`publish`; gathered ones are released.
        """
        self.root.about_to_change()
        if self.releases:
            self.reshard()
        else:
            self.complete()  # a gather under way sends the piece
        start, stop, offset = self.local_range(slot)
        part = slice(offset, offset + stop - start)
        read(start, stop, self.own[part])
        self._refresh_masters(part)

    def begin_load(self) -> torch.Tensor:
        """The memory [shard_numel] that a checkpoint is loaded into: masters where these are here, else the shard of
        the parameters, which is to be filled at once where it rests on a disk. Parameters show it after
        :meth:`end_load`; gathered ones are released.
        """
        self.root.about_to_change()
        if self.releases:
            self.reshard()
        else:
            self.complete()  # a gather under way sends what is about to change
        return self.own if self.masters_are_away else self.master

    def end_load(self) -> None:
        """What :meth:`begin_load` gave was filled. Collective over the shard axis."""
        if self.masters_are_away:
            self.num_edits += 1
        self.publish(copied=self.masters_are_away)

    def publish(self, *, copied: bool = False) -> None:
        """Make the masters the parameters."""
        raise NotImplementedError

    def invalidate_copies(self) -> None:
        """The shard was written to, so second shards made from it are out of date. Every rank calls it."""
        self._gathering.invalidate()

    def note_versions(self) -> None:
        """What the parameters hold now is what shard and masters hold."""
        self._versions = self.versions.now()

    def _refresh_masters(self, part: slice) -> None:
        """Take what is in this part of the shard into the masters. Values that these round to were not edited: there
        the masters keep their full precision.
        """
        if self.masters_are_away:
            self.num_edits += 1
        elif self.has_masters:
            own, master = self.own_to_read[part], self.master[part]
            master.copy_(torch.where(master.to(own.dtype) == own, master, own.to(master.dtype)))


def _resized(slot: ParameterSlot) -> str:
    """What to say of a parameter that has another shape than when it was sharded."""
    before, now = tuple(slot.shape), tuple(slot.param.shape)
    return (
        f"parameter {slot.name!r} was resized after sharding, from {before} to {now} (by param.data = ..., "
        "model.resize_token_embeddings(...), ...): its shards and optimizer states have the old shape. Resize before "
        "shardcore.shard"
    )
