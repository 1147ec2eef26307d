"""Ranks on different branches: each joins the gathers that the others need, so that none waits for ever.

As long as all ranks use the same units in the same order, they never ask one another. Where a branch depends on the
rank (experts, images in some batches only, texts of different lengths) they *part*: each tells what it has entered
already, and from then on they take turns. A turn is a small all-reduce of what each rank needs next. What comes first
is run by all ranks, as guests where they do not need it: a guest gives its shard to a gather, and zeros to a
reduction. Gathers come before reductions, so that a reduction begins once every rank has come to one; forwards come
before backwards, first units first in forward and last in backward, so ranks that go through the model in its own
order gather and reduce each unit once.

Turns end in an error only where ranks come to different points that no rank can join: a step here, a state_dict there.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
import zlib
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch

from shardcore import _torch_private as private
from shardcore.comm import circles, watch
from shardcore.comm.agree import exchange, max_over_ranks
from shardcore.errors import RankMismatchError
from shardcore.mesh import Axis

_log = logging.getLogger("shardcore")
_NOT_THERE = -(1 << 40)
_NUM_TOLD = 8
"""Entered collectives that a rank tells of. One that had no reason to ask is ahead of one that asks by the gathers that
it has started and not waited for: its look-ahead, mostly one or two. Further ahead, it would seem not to come.
"""


class Guest(Protocol):
    """Parameters of which this rank can join collectives that it does not need itself."""

    def join_gather(self) -> None:
        """Take part in their gather; nothing else changes here."""

    def join_reduce(self) -> None:
        """Take part in the reduction of their gradients, with zeros."""


@dataclass(slots=True)
class Branches:
    """What this process knows of branches along one axis."""

    gathers: list[str] = field(default_factory=list)
    """Labels of gathers that ranks may join, in the order of models and units: the same on all ranks."""
    reductions: list[str] = field(default_factory=list)
    """Labels of reductions that ranks may join, in the order in which a backward runs them."""
    guests: dict[str, weakref.ref[Guest]] = field(default_factory=dict)
    """By label, who joins it."""
    num_models: int = 0
    obstacle: str = ""
    """A setting of a model under which ranks cannot join: gathers in several steps, quantised, or over other axes."""
    owed: list[str] = field(default_factory=list)
    """What other ranks had entered when they parted, and this one had not."""
    axis: Axis | None = None
    """The axis, once its ranks have parted, and when they did; they stay apart until a failed step is reset."""
    parted_in_epoch: int = -1
    is_in_turn: bool = False

    @property
    def are_apart(self) -> bool:
        """Whether the ranks take turns."""
        return self.parted_in_epoch == watch.board().epoch

    def invite(self, labels: list[str], label: str, guest: Guest) -> None:
        """Let other ranks need this collective; ``labels`` is ``gathers`` or ``reductions``."""
        labels.append(label)
        self.guests[label] = weakref.ref(guest)

    def join(self, label: str) -> None:
        """Run a collective that other ranks need."""
        guest = self.guests[label]()
        if guest is None:
            raise RankMismatchError(f"other ranks run '{label}' of a model that this rank has dropped")
        if label in self.reductions:
            guest.join_reduce()
        else:
            guest.join_gather()

    def precedence(self, label: str, *, in_backward: bool) -> int:
        """Of two collectives the one with more comes first; 0 for one that cannot be joined."""
        if label not in self.guests:
            return 0
        num_reductions, num_gathers = len(self.reductions), len(self.gathers)
        if label in self.reductions:
            return num_reductions - self.reductions.index(label)
        position = self.gathers.index(label)
        return num_reductions + (position + 1 if in_backward else 2 * num_gathers - position)

    def label_of(self, precedence: int) -> str:
        """The collective of this precedence."""
        num_reductions, num_gathers = len(self.reductions), len(self.gathers)
        if precedence <= num_reductions:
            return self.reductions[num_reductions - precedence]
        place = precedence - num_reductions
        return self.gathers[place - 1 if place <= num_gathers else 2 * num_gathers - place]


def branches_of(axis: Axis) -> Branches:
    """What is known of branches along the axis."""
    b = watch.board()
    found: Branches | None = b.branches.get(axis.key)
    if found is None:
        found = b.branches[axis.key] = Branches()
    return found


def name_of_next_model(axis: Axis) -> str:
    """What tells the units of one model from those of another in the order of collectives; empty for the first."""
    state = branches_of(axis)
    state.num_models += 1
    return "" if state.num_models == 1 else f" of model {state.num_models}"


def all_enter(axis: Axis, label: str) -> bool:
    """Whether every rank of the axis is about to enter this collective. If so, none has entered it yet; if not, they
    part here and each calls :func:`part`. Collective, by the store.

    Raises:
        RankMismatchError: they have entered different ones before, or do not come.
        RankFailedError: a rank has failed.
    """
    b = watch.board()
    if b.store is None:
        return True
    watch.withdraw_failure(b)
    entry, key = watch.upcoming(axis, label), axis.key
    # A rank may be some collectives ahead of the others, so the last few are told, as it asked for them.
    known = dict(list(b.history[key])[-_NUM_TOLD:]) | b.asked[key] | {entry.sequence: label}
    b.asked[key] = {entry.sequence: label}
    b.store.set(watch.key_of(b, f"next/{key}/{b.rank}"), json.dumps(list(known.items())))
    waiting = [rank for rank in axis.ranks if rank != b.rank]
    began = noted = time.monotonic()
    while waiting:
        told = watch.published(b, axis, "next")
        if time.monotonic() - noted > watch.PATIENCE_S:
            noted = time.monotonic()
            watch.look_around(entry)
            circles.look(entry)
            watch.raise_gone(b, entry)
            if watch.published(b, axis, "parted"):
                return False
            # Ranks that did not need to ask wait in the collective itself.
            told = {rank: told.get(rank, {}) | found for rank, found in watch.published(b, axis).items()} or told
        for rank in [rank for rank in waiting if entry.sequence in told.get(rank, ())]:
            if told[rank][entry.sequence] != label:
                return False
            waiting.remove(rank)
        if waiting and noted - began > watch.timeout_s():
            raise RankMismatchError(
                f"{watch.where(entry)}: ranks {waiting} did not come within {watch.timeout_s():.0f} s"
            )
        if waiting:
            time.sleep(watch.POLL_S)
    return True


def part(axis: Axis, want: str = "") -> None:
    """From now on the ranks of the axis take turns. What some have entered already, the others owe. Collective, by the
    store.

    Args:
        want: what this rank is about to enter, if it is.

    Raises:
        RankMismatchError: a rank has entered something that a rank on another branch cannot join.
        RankFailedError: a rank has failed.
    """
    b, state = watch.board(), branches_of(axis)
    entered = dict(b.history[axis.key])
    everyone = {b.rank: entered} | _tell_all(axis, entered)
    for rank, theirs in everyone.items():
        difference = watch.first_difference(entered, theirs)
        if difference is not None:
            watch.raise_difference(b, axis, rank, difference)
    ends = {rank: max(each, default=-1) + 1 for rank, each in everyone.items()}
    first, farthest = min(ends.values()), max(ends, key=lambda rank: (ends[rank], rank))
    common = everyone[farthest]
    can_join = all(common.get(n) in state.guests for n in range(first, ends[farthest]))
    if not (can_join and state.guests and not state.obstacle):
        _raise_parted(axis, first, everyone, want)
    state.owed = [common[n] for n in range(ends[b.rank], ends[farthest])]
    state.axis, state.parted_in_epoch = axis, b.epoch
    state.is_in_turn = False
    b.num_partings += 1
    b.on_entry = _take_turn_if_apart
    if axis.rank == 0:
        _log.warning(
            "ranks of axis %r use different units of the model. Each joins what the others use and they agree on every "
            "gather from now on, which is slower than one order on all ranks",
            axis.name,
        )


def settle() -> None:
    """Join what other ranks need, until all have come here. Nothing where ranks have not parted. Collective over the
    axes along which they have.
    """
    for state in watch.board().branches.values():
        if state.axis is not None:
            _take_turn_if_apart(state.axis, "the end of a step")


def _take_turn_if_apart(axis: Axis, label: str) -> None:
    """This rank is about to enter a collective, of whatever kind. Where ranks have parted, it takes its turn."""
    state: Branches | None = watch.board().branches.get(axis.key)
    if state is None or state.is_in_turn or not state.are_apart:
        return
    state.is_in_turn = True
    try:
        _take_turn(axis, state, label)
    finally:
        state.is_in_turn = False


def _take_turn(axis: Axis, state: Branches, label: str) -> None:
    """Return when all ranks of the axis are about to enter this collective, or are ready to join it; until then this
    rank joins what they need. Collective.

    Raises:
        RankMismatchError: ranks have come to different points that cannot be joined, or use a model that was dropped.
    """
    while state.owed:
        state.join(state.owed.pop(0))
    while True:
        first = _first_needed(axis, state, label)
        if first is None or first == label:
            return
        state.join(first)


def _first_needed(axis: Axis, state: Branches, label: str) -> str | None:
    """The collective to run next; None if no rank needs one that can be joined, and all have come to ``label``."""
    mine = state.precedence(label, in_backward=private.in_backward())
    code = zlib.crc32(label.encode())
    told = torch.tensor([mine, _NOT_THERE, _NOT_THERE] if mine else [0, code, -code])
    first, most, least = map(int, max_over_ranks(told, axis, "turn").tolist())
    if first:
        return state.label_of(first)
    if most != -least:
        _raise_apart(axis, label)
    return None


def _follow(entry: watch.Entry) -> None:
    """If other ranks have parted while this one waited, part with them."""
    axis = entry.axis
    if not branches_of(axis).are_apart and watch.published(watch.board(), axis, "parted"):
        part(axis)


watch.on_silence(_follow)  # from the start: a rank that has not asked for branches must follow those that have, too


def _tell_all(axis: Axis, entered: dict[int, str]) -> dict[int, dict[int, str]]:
    """Publish what this rank has entered, and return what the others have, once they have published."""
    b = watch.board()
    if b.store is None:
        return {}
    b.store.set(watch.key_of(b, f"parted/{axis.key}/{b.rank}"), json.dumps(list(entered.items())))
    watch.withdraw_failure(b)
    entry = watch.upcoming(axis, "what the other ranks have entered")
    deadline = time.monotonic() + watch.timeout_s()
    noted = time.monotonic()
    while True:
        found = watch.published(b, axis, "parted")
        missing = [rank for rank in axis.ranks if rank != b.rank and rank not in found]
        if not missing:
            return found
        watch.raise_failure(b, entry)
        if time.monotonic() - noted > watch.PATIENCE_S:
            noted = time.monotonic()
            watch.raise_ended(b, entry, missing)
            watch.raise_gone(b, entry)
        if time.monotonic() > deadline:
            raise RankMismatchError(
                f"{watch.where(entry)}: ranks {missing} did not come within {watch.timeout_s():.0f} s"
            )
        time.sleep(watch.POLL_S)


def _raise_parted(axis: Axis, sequence: int, everyone: dict[int, dict[int, str]], want: str) -> NoReturn:
    """Ranks cannot join one another's collectives from ``sequence`` on: name what they do there."""
    b = watch.board()
    wanted = watch.published(b, axis, "next")
    labels = {rank: each.get(sequence) or wanted.get(rank, {}).get(sequence, "") for rank, each in everyone.items()}
    mine = labels[b.rank] or want
    other = next((rank for rank, label in labels.items() if label not in ("", mine) and rank != b.rank), b.rank)
    obstacle = branches_of(axis).obstacle
    advice = (
        f". Ranks join what others use, but not with {obstacle}: do without it, or use one order" if obstacle else ""
    )
    watch.raise_difference(b, axis, other, (sequence, mine, labels[other]), advice)


def _raise_apart(axis: Axis, label: str) -> NoReturn:
    """Ranks wait for one another in different things. Collective."""
    labels = exchange(label, axis, "labels")
    position = next(i for i, other in enumerate(labels) if other != label)
    b = watch.board()
    watch.raise_difference(
        b, axis, axis.ranks[position], (watch.upcoming(axis, label).sequence, label, labels[position])
    )
