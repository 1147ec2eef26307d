"""This rank's shard of a group's parameters, and its masters, wherever they rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardcore.offload import ShardStore, StoredShard
    from shardcore.plan import ShardLayout


class RestingShard:
    """Base of :class:`shardcore.zero.group.ShardGroup`. A shard on a disk is in memory from when it is asked for until
    another group's is: what works on shards works on one group after the other.
    """

    layout: ShardLayout
    updates_on_host: bool
    """Whether the CPU updates the masters."""
    _own: torch.Tensor
    _stored: StoredShard | None
    _master: torch.Tensor | None

    @property
    def shard_numel(self) -> int:
        """Elements of the shard."""
        return self.layout.shard_numel

    @property
    def rests_on_disk(self) -> bool:
        """Whether the shard of the parameters rests on a disk."""
        return self._stored is not None

    @property
    def store(self) -> ShardStore | None:
        """That of all groups whose shards rest on a disk."""
        return None if self._stored is None else self._stored.store

    @property
    def own(self) -> torch.Tensor:
        """[shard_numel] the shard of the parameters, to be read and written."""
        return self._own if self._stored is None else self._stored.edit()

    @property
    def own_to_read(self) -> torch.Tensor:
        """As ``own``, to be read only."""
        return self._own if self._stored is None else self._stored.read()

    @property
    def own_to_fill(self) -> torch.Tensor:
        """As ``own``, to be written as a whole; what it holds is undefined."""
        return self._own if self._stored is None else self._stored.fill()

    def copy_of_own(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the shard: a view, but a copy where it rests on a disk."""
        return self._own[start:stop] if self._stored is None else self._stored.copy(start, stop)

    @property
    def master(self) -> torch.Tensor:
        """[shard_numel] the master weights: ``own`` where they are the parameters themselves; of no elements while they
        rest on a disk.
        """
        return self.own if self._master is None else self._master

    @property
    def has_masters(self) -> bool:
        """Whether masters are kept beside the parameters."""
        return self._master is not None

    @property
    def masters_are_away(self) -> bool:
        """Whether they rest on a disk, with the states, and are here in steps only."""
        return self._master is not None and self._master.numel() != self.shard_numel

    def _note_device_read(self) -> None:
        """The device has been told to read ``own_to_read``."""
        if self._stored is not None:
            self._stored.note_device_read()
