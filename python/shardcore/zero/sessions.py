"""Contexts that show whole parameters: ``summon`` and ``gathered``. What is written inside reaches every rank, or none.

A context remembers what it showed: version counters tell which parameter was written to, and a sum over its bits tells
of writes that leave no trace there (``param.data.fill_()``). Each rank keeps the values of one part, so that together
they can undo all writes. Entering and leaving are collective, also by an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.protocols import ParameterSlot, find_experts, find_root, find_slot, not_sharded
from shardcore.zero.group import ShardGroup
from shardcore.zero.root import Root

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def root_of(module: nn.Module) -> Root:
    """What ``zero.shard`` left on the module.

    Raises:
        ConfigError: the module is not sharded, or only a part of a model that is.
    """
    root = find_root(module)
    if root is None:
        raise ConfigError(not_sharded(module))
    return root  # type: ignore[no-any-return]


@contextmanager
def summon(module: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
    """Inside, every parameter is whole and readable on every rank. Collective over the data-parallel axis, both on
    entering and on leaving.

    Args:
        writeback: keep what was written to the parameters; all ranks must write the same. Without it, a write is undone
            at the end.

    Raises:
        StateError: a parameter was written to without ``writeback=True``; the message names it, on every rank.
        RankMismatchError: ranks wrote different values, or only some wrote. The write is undone.
    """
    root = root_of(module)
    slots = {slot for group in root.groups for slot in group.slots}
    with _session(root, root.groups, slots if writeback else set(), None):
        yield module


@contextmanager
def gathered(params: Iterable[nn.Parameter], modifier_rank: int | None = None, enabled: bool = True) -> Iterator[None]:
    """Inside, these parameters are whole. With ``modifier_rank`` (a rank of the job), that rank's edits reach all ranks
    and the masters, and what others wrote to them is overwritten. Collective over the data-parallel axis, on entering
    and on leaving. Parameters that are not sharded pass through. May be nested, also around passes of the model.

    Raises:
        StateError: a parameter was written to without ``modifier_rank``, or one that was not listed; the message names
            it, on every rank, and the write is undone.
        ConfigError: ``modifier_rank`` is not on the data-parallel axis.
    """
    slots = dict.fromkeys(slot for slot in map(find_slot, params) if slot is not None) if enabled else {}
    by_root: dict[Root, list[ParameterSlot]] = {}
    for slot in slots:
        by_root.setdefault(slot.group.root, []).append(slot)
    with _all_of(list(by_root.items()), modifier_rank):
        yield


@contextmanager
def _all_of(parts: Sequence[tuple[Root, list[ParameterSlot]]], modifier_rank: int | None) -> Iterator[None]:
    """One session for each model."""
    if not parts:
        yield
        return
    root, slots = parts[0]
    if modifier_rank is not None and modifier_rank not in root.data_axis.ranks:
        raise ConfigError(
            f"modifier_rank={modifier_rank!r} is not on the data-parallel axis, whose ranks are "
            f"{list(root.data_axis.ranks)}"
        )
    experts = next((slot.name for slot in slots if find_experts(slot.param) is not None), None)
    if modifier_rank is not None and experts is not None:
        raise ConfigError(
            f"modifier_rank={modifier_rank!r}: other ranks hold other experts of {experts!r}, so one rank cannot set "
            "them for all; write to them inside summon(writeback=True), or load whole ones by shardcore.load_state_dict"
        )
    groups = sorted({slot.group for slot in slots}, key=lambda group: int(group.index))
    writable = set() if modifier_rank is None else set(slots)
    with _session(root, groups, writable, modifier_rank), _all_of(parts[1:], modifier_rank):
        yield


@contextmanager
def _session(
    root: Root, groups: Sequence[ShardGroup], writable: set[ParameterSlot], source: int | None
) -> Iterator[None]:
    if "lp_params" in root.offloaded:
        root.check_here("lp_params", what="reading whole parameters")
    if not root.is_passing:
        root.rest()
    if writable:
        root.about_to_change()
    session = Session(root, groups, writable, source)
    try:
        yield
    except BaseException as error:
        try:
            session.close()
        except RankMismatchError:  # the other ranks are elsewhere: they learn why
            comm.report_failure(error)
        except StateError as second:
            error.add_note(str(second))
        raise
    session.close()


class Session:
    """One open context: what it showed, what may be written, and whose edits count."""

    def __init__(
        self, root: Root, groups: Sequence[ShardGroup], writable: set[ParameterSlot], source: int | None
    ) -> None:
        self._root = root
        self._groups = groups
        self._writable = writable
        self._source = source
        self._slots = [slot for group in groups for slot in group.slots]
        for group in groups:
            group.pin()
        self._versions = dict(zip(self._slots, versions(self._slots), strict=True))
        self._shown = {group: Shown(group) for group in groups}
        root.sessions.append(self)

    def close(self) -> None:
        """Agree with all ranks on what was written, keep or undo it, and let go. Collective.

        Raises:
            StateError: something was written that may not be, or data were replaced.
            RankMismatchError: ranks wrote different things.
        """
        self._root.sessions.remove(self)
        try:
            problem = self._settle()
        finally:
            self._shown.clear()  # its views would look like somebody else's
            for group in self._groups:
                group.unpin()
                if not self._root.is_passing:
                    group.watch()
        if problem is not None:
            raise problem

    def refresh(self, groups: Iterable[ShardGroup], written: dict[ParameterSlot, int]) -> None:
        """An inner context, or a call that sets values, changed parameters with right; show these from now on."""
        for group in groups:
            if group in self._shown:
                self._shown[group] = Shown(group)
        for slot, count in written.items():
            if slot in self._versions:
                self._versions[slot] += count

    def _settle(self) -> Exception | None:
        fault, anywhere = self._agree()
        bad_groups = [group for group in self._groups if fault[group]]
        if bad_groups:
            text = self._text_of_fault(bad_groups)
            self._restore(self._groups)
            return StateError(
                f"{text}. The parameters are as they were before the context; what else was changed in it (sizes that "
                "modules and configurations keep, modules put in place of others) is not"
            )
        forbidden = [slot for slot in self._slots if anywhere[slot] and slot not in self._writable]
        if forbidden:
            self._restore(self._groups)
            names = [slot.name for slot in forbidden]
            return StateError(
                f"parameters {names[:5]} were written to while gathered for reading (on some rank), so the writes were "
                "undone; use summon(model, writeback=True), or list them in GatheredParameters(..., modifier_rank=0)"
            )
        if not self._writable:
            return None
        if self._source is not None:
            self._spread()
        else:
            mismatch = self._compare([slot for slot in self._slots if anywhere[slot]])
            if mismatch is not None:
                self._restore(self._groups)
                return mismatch
        self._keep()
        return None

    def _agree(self) -> tuple[dict[ShardGroup, bool], dict[ParameterSlot, bool]]:
        """(whether data of a group were replaced, whether a parameter was written to), on any rank."""
        faults = [_has_fault(group) for group in self._groups]
        counted = [self._versions[slot] != now for slot, now in zip(self._slots, versions(self._slots), strict=True)]
        changed = [
            each
            for group, fault in zip(self._groups, faults, strict=True)
            for each in ([False] * len(group.slots) if fault else self._shown[group].changed())
        ]
        written = [count or change for count, change in zip(counted, changed, strict=True)]
        flags = torch.tensor([*faults, *written], dtype=torch.uint8)
        agreed = comm.max_over_ranks(flags, self._root.data_axis, "writes to gathered parameters").bool().tolist()
        count = len(self._groups)
        return dict(zip(self._groups, agreed, strict=False)), dict(zip(self._slots, agreed[count:], strict=True))

    def _text_of_fault(self, groups: Sequence[ShardGroup]) -> str:
        for group in groups:
            try:
                group.check_storage()
            except StateError as error:
                return str(error)
        return f"another rank replaced the data of a parameter of unit {groups[0].name}; its message says more"

    def _spread(self) -> None:
        """Give the source's values of what is writable to all ranks."""
        axis = self._root.data_axis
        position = axis.ranks.index(self._source)  # checked on entering
        works = [
            comm.broadcast(slot.group.full[slot.offset : slot.offset + slot.numel], axis, position, slot.name)
            for slot in self._slots
            if slot in self._writable
        ]
        for work in works:
            work.wait()

    def _compare(self, written: Sequence[ParameterSlot]) -> Exception | None:
        """All ranks must have written the same to the same parameters, so that they hold the same."""
        if self._root.data_axis.size == 1 or not written:
            return None
        with private.without_torch_function():
            mine = [comm.fingerprint(slot.param) for slot in written]
        wrong = []
        axes = {slot.group.data_axis.key: slot.group.data_axis for slot in written}
        for axis in axes.values():
            everywhere = comm.exchange(mine, axis, "what was written")
            for slot, *prints in zip(written, *everywhere, strict=True):
                if slot.group.data_axis.key == axis.key and len(set(prints)) > 1:
                    wrong.append(slot.name)
        if axes.keys() != {self._root.data_axis.key}:  # experts: others may have found what is alike here
            wrong = [name for names in comm.exchange(wrong, self._root.data_axis, "what differs") for name in names]
        if not wrong:
            return None
        return RankMismatchError(
            f"parameters {wrong[:5]} were written differently on the ranks inside summon(writeback=True), so the "
            "writes were undone: write the same on all ranks, or use GatheredParameters(params, modifier_rank=...)"
        )

    def _keep(self) -> None:
        """Take what is in the whole parameters into shards and masters, and tell the contexts around this one."""
        groups = [group for group in self._groups if self._writable.intersection(group.slots)]
        for group in groups:
            group.adopt_edits()
        now = versions(self._slots)
        deltas = {slot: new - self._versions[slot] for slot, new in zip(self._slots, now, strict=True)}
        for session in self._root.sessions:
            session.refresh(groups, deltas)

    def _restore(self, groups: Sequence[ShardGroup]) -> None:
        """Undo all writes since the context was entered. Collective."""
        for group in groups:
            self._shown[group].restore()
            group.repoint()
            group.note_versions()


class Shown:
    """What a group's whole parameters were: a sum over the bits of each, and the values of this rank's part."""

    def __init__(self, group: ShardGroup) -> None:
        self._full = group.full
        self._axis = group.data_axis
        self._name = group.name
        part = -(-self._full.numel() // self._axis.size)
        self._parts = [self._full[i * part : (i + 1) * part] for i in range(self._axis.size)]
        self._mine = self._parts[self._axis.rank].clone()
        self._ranges = [slice(slot.offset, slot.offset + slot.numel) for slot in group.slots]
        self._sums = self._sum_bits()

    def changed(self) -> list[bool]:
        """Of each parameter, whether the values on this rank differ from those that were shown."""
        found: list[bool] = (self._sum_bits() != self._sums).tolist()
        return found

    def restore(self) -> None:
        """Every rank gives its part back. Collective over the data-parallel axis."""
        self._parts[self._axis.rank].copy_(self._mine)
        for position, part in enumerate(self._parts):
            comm.broadcast(part, self._axis, position, f"{self._name} undone").wait()

    def _sum_bits(self) -> torch.Tensor:
        """[parameters] of int64."""
        bits = self._full.view(_BITS[self._full.element_size()])
        sums = [bits[part].sum(dtype=torch.int64) for part in self._ranges]
        return torch.stack(sums) if sums else bits.new_zeros(0, dtype=torch.int64)


def versions(slots: Sequence[ParameterSlot]) -> list[int]:
    """The version counters of these parameters."""
    return private.versions([slot.param for slot in slots])


def _has_fault(group: ShardGroup) -> bool:
    try:
        group.check_storage()
    except StateError:
        return True
    return False
