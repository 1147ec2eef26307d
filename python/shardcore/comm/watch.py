"""Never a hang: every wait polls, and after a second of silence the ranks compare notes.

Each rank keeps the recent collectives of each axis in program order. A rank that has waited longer than ``PATIENCE_S``
publishes that history in the job's key-value store, which works while collectives do not, and reads the others'. Ranks
whose histories differ raise :class:`RankMismatchError` naming the first difference; a rank that failed has left its
message there, and all raise with it. Ranks that merely compute longer are waited for.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import time
import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from shardcore import _torch_private as private
from shardcore._core import HostLink
from shardcore._torch_private import Store
from shardcore.comm.processes import process_space, runs
from shardcore.errors import RankFailedError, RankMismatchError, StateError
from shardcore.mesh import Axis

PATIENCE_S = 1.0
LONG_WAIT_S = 10.0
"""After which a rank says for whom it waits."""
_log = logging.getLogger("shardcore")
_HISTORY = 128
POLL_S = 2e-4
_GRACE_S = 3.0
"""How long a rank that lost a connection waits for the other side's last words."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective in program order: the ``sequence``-th on its axis."""

    axis: Axis
    sequence: int
    label: str
    on_cuda: bool = False
    """Its wait orders the stream instead of blocking the host, so there is nothing to watch."""


class Unfinished(Protocol):
    """A collective of several steps, not all of which have started."""

    def start_rest(self) -> None:
        """Start them, each when the one before it is complete."""


@dataclass(slots=True)
class _Board:
    """What this process knows and tells about the job; made anew for each process group."""

    store: Store | None
    rank: int
    epoch: int = 0
    digest: int = 0
    """Of all collectives since the last comparison, along every axis."""
    program: deque[tuple[int, str]] = field(default_factory=lambda: _new_history())
    """The last of them, numbered."""
    num_in_program: int = 0
    failure: str | None = None
    """What this rank has told of its own failure."""
    pid: int = field(default_factory=os.getpid)
    sequence: dict[str, int] = field(default_factory=dict)
    history: dict[str, deque[tuple[int, str]]] = field(default_factory=lambda: defaultdict(_new_history))
    asked: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """Per axis the last collective that ranks compared notes on before it, by its number: they may have told one
    another more than its name."""
    links: dict[str, HostLink | None] = field(default_factory=dict)
    """Per axis: how its ranks read each other's memory, if they may."""
    unfinished: Unfinished | None = None
    """The last collective, where it has steps that have not started."""
    on_entry: Callable[[Axis, str], None] | None = None
    """Called with each collective before it is entered, once ranks have parted somewhere."""
    branches: dict[str, Any] = field(default_factory=dict)
    """Per axis, its :class:`shardcore.comm.branches.Branches`."""
    circles: Any = None
    """Its :class:`shardcore.comm.circles.Circles`, once it has waited for a while."""
    num_partings: int = 0
    waits_at: tuple[str, int] | None = None
    """The collective that this rank waits for, by its axis and number."""
    waits_since: float = 0.0
    """On the monotonic clock; infinite once it has been told."""


def _new_history() -> deque[tuple[int, str]]:
    return deque(maxlen=_HISTORY)


_board: _Board | None = None
_followers: list[Callable[[Entry], None]] = []
_excepthook = sys.excepthook


def board() -> _Board:
    """The board of the current process group."""
    global _board
    store = private.default_store() if dist.is_initialized() else None
    if _board is None or _board.store is not store:
        _board = _Board(store, dist.get_rank() if store is not None else 0)
        if store is not None:
            store.set(f"shardcore/process/{_board.rank}", json.dumps([process_space(), os.getpid()]))
        sys.excepthook = _report_uncaught
        atexit.unregister(_report_end)
        atexit.register(_report_end)
    return _board


def record(axis: Axis, operation: str, unit: str, numel: int, *, on_cuda: bool = False) -> Entry:
    """Note that this rank enters a collective now. One that has steps left starts them first, so that the order of
    all steps is that of the program, whoever waits for what.
    """
    label = label_of(operation, unit, numel)
    b = board()
    refuse_fork(label)
    start_unfinished()
    if b.on_entry is not None and operation != "link":  # ranks connect in the middle of another collective
        b.on_entry(axis, label)
    withdraw_failure(b)
    key = axis.key
    sequence = b.sequence.get(key, 0)
    b.sequence[key] = sequence + 1
    b.history[key].append((sequence, label))
    # Without the size: data-parallel ranks may read batches of other shapes, and so exchange other activations.
    step = f"{operation} {unit}"
    b.digest = zlib.crc32(f"{step}\n".encode(), b.digest)
    b.program.append((b.num_in_program, step))
    b.num_in_program += 1
    return Entry(axis, sequence, label, on_cuda)


def refuse_fork(label: str) -> None:
    """Raise :class:`StateError` in a process that was forked from a rank, which has none of the rank's connections."""
    if board().pid != os.getpid():
        raise StateError(
            f"'{label}' in a forked process: exchanges between ranks belong to the process that started them. Use a "
            "sharded model in its rank's own process (a DataLoader's workers must not touch it)"
        )


def start_unfinished() -> None:
    """Start what is left of a collective of several steps, before anything else is entered."""
    b = board()
    if b.unfinished is not None:
        unfinished, b.unfinished = b.unfinished, None
        unfinished.start_rest()


def label_of(operation: str, unit: str, numel: int) -> str:
    """How a collective is called in comparisons and messages."""
    return f"{operation} {unit} [{numel}]"


def upcoming(axis: Axis, label: str) -> Entry:
    """What :func:`record` would note if the collective were entered now."""
    return Entry(axis, board().sequence.get(axis.key, 0), label)


class Waitable(Protocol):
    """A collective under way."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return when it is complete; raise after ``timeout``."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""


def on_silence(notice: Callable[[Entry], None]) -> None:
    """Call ``notice`` with a collective in which this rank has waited for a while, again and again."""
    _followers.append(notice)


def wait(work: Waitable, entry: Entry) -> None:
    """Wait for a collective; raises instead of hanging.

    Raises:
        RankMismatchError: the ranks of the axis are in different collectives.
        RankFailedError: a rank has failed, or is gone.
    """
    if entry.on_cuda:
        work.wait()
        return
    deadline, has_ended = time.monotonic() + timeout_s(), False
    while True:
        try:
            work.wait(timedelta(seconds=PATIENCE_S))
            return
        except RuntimeError as error:
            if has_ended or "timed out" not in str(error).lower():
                raise_lost_connection(entry, error)
        has_ended = work.is_completed()  # well or not, which the next wait tells
        look_around(entry)
        for notice in _followers:
            notice(entry)
        if time.monotonic() > deadline:
            raise RankMismatchError(f"{where(entry)}: no answer within {timeout_s():.0f} s. {_absent(entry)}")


def look_around(entry: Entry) -> None:
    """Publish where this rank is, and compare with the ranks that published too."""
    b = board()
    if b.store is None:
        return
    raise_failure(b, entry)
    key = entry.axis.key
    b.store.set(key_of(b, f"at/{key}/{b.rank}"), json.dumps(list(b.history[key])))
    for rank, theirs in published(b, entry.axis).items():
        difference = first_difference(dict(b.history[key]), theirs)
        if difference is not None:
            raise_difference(b, entry.axis, rank, difference)
    _tell_long_wait(b, entry)


def _tell_long_wait(b: _Board, entry: Entry) -> None:
    """Log once which ranks this one waits for. They may compute; or wait in a call of another library, for ever."""
    now, place = time.monotonic(), (entry.axis.key, entry.sequence)
    if b.waits_at != place:
        b.waits_at, b.waits_since = place, now
    if now - b.waits_since < LONG_WAIT_S:
        return
    b.waits_since = math.inf
    told = [*published(b, entry.axis).items(), *published(b, entry.axis, "next").items()]
    there = {rank for rank, theirs in told if entry.sequence in theirs}
    late = [rank for rank in entry.axis.ranks if rank != b.rank and rank not in there]
    if late:
        _log.warning(
            "rank %d has waited %.0f s for ranks %s in %s, and goes on waiting for up to %.0f s (SHARDCORE_TIMEOUT). "
            "If they do not compute, they wait themselves in a call that is not shardcore's (a barrier, a metric's "
            "all-reduce), which this rank does not reach: all ranks must make the same calls of the model before it",
            b.rank,
            LONG_WAIT_S,
            late,
            where(entry),
            timeout_s(),
        )


def program_digest() -> int:
    """A 32-bit digest of all collectives of this process since the last comparison; equal on all ranks of a sound
    job.
    """
    return board().digest


def raise_on_program_mismatch(axis: Axis, *, equal: bool) -> None:
    """End a comparison of :func:`program_digest`: start a new one, or report where ranks differ. Collective where
    unequal.

    Equal sizes let collectives of different units complete against one another; without this the step would go wrong
    silently.
    """
    b, program = board(), board().program
    _begin_program(b)
    if equal:
        return
    if b.store is not None:
        mine = dict(program)
        b.store.set(key_of(b, f"program/{axis.key}/{b.rank}"), json.dumps(list(program)))
        keys = [key_of(b, f"program/{axis.key}/{rank}") for rank in axis.ranks]
        b.store.wait(keys, timedelta(seconds=_GRACE_S * 3))
        for rank, theirs in published(b, axis, "program").items():
            difference = first_difference(mine, theirs)
            if difference is not None:
                raise RankMismatchError(
                    f"ranks used different units in this step, and their data were mixed: at number {difference[0]} "
                    f"of the step rank {b.rank} ran '{difference[1]}', rank {rank} ran '{difference[2]}' (found on "
                    f"axis {axis.name!r}). The step was not applied. Every rank must use the same units in the same "
                    "order"
                )
    raise RankMismatchError(
        f"ranks ran different collectives in this step (found on axis {axis.name!r} by rank {b.rank}). The step was "
        "not applied. Every rank must use the same units in the same order"
    )


def _begin_program(b: _Board) -> None:
    b.digest, b.program, b.num_in_program = 0, _new_history(), 0


def report_failure(error: BaseException) -> None:
    """Tell the other ranks that this one cannot go on. The first report of the job is kept. Never raises.

    If the exception is caught after all, the report is withdrawn as soon as this rank enters its next collective.
    """
    b = board()
    if b.store is None or b.failure is not None or isinstance(error, RankFailedError):
        return
    text = "".join(traceback.format_exception_only(error)).strip()
    b.failure = json.dumps({"rank": b.rank, "message": text})
    with suppress(RuntimeError):  # the store went with rank 0: nobody is left to be told
        b.store.compare_set(key_of(b, "failure"), "", b.failure)


def withdraw_failure(b: _Board) -> None:
    """If this rank has failed, it goes on all the same."""
    if b.failure is None:
        return
    told, b.failure = b.failure, None
    if b.store is not None:
        with suppress(RuntimeError):
            b.store.compare_set(key_of(b, "failure"), told, "")  # an empty report is none


def check_level(axis: Axis) -> None:
    """Raise on every rank unless all ranks of the axis have entered the same number of collectives. Collective, by
    the store.

    After an exception this tells whether what is in flight will complete and the connections may be used again.

    Raises:
        RankMismatchError: they have not, or a rank did not come.
    """
    b = board()
    if b.store is None or axis.size == 1:
        return
    b.store.set(key_of(b, f"level/{b.rank}"), json.dumps(b.sequence))
    try:
        b.store.wait([key_of(b, f"level/{rank}") for rank in axis.ranks], timedelta(seconds=_GRACE_S * 3))
    except RuntimeError as error:
        raise RankMismatchError(
            f"rank {b.rank} resets the step, but not all ranks of {list(axis.ranks)} do so within "
            f"{_GRACE_S * 3:.0f} s; after an "
            "exception every rank must call reset_iteration()"
        ) from error
    for rank in axis.ranks:
        theirs: dict[str, int] = json.loads(b.store.get(key_of(b, f"level/{rank}")))
        for key in b.sequence.keys() & theirs.keys():
            if b.sequence[key] != theirs[key]:
                raise RankMismatchError(
                    f"the step cannot be reset: rank {b.rank} stopped after {b.sequence[key]} collectives, rank "
                    f"{rank} after {theirs[key]}, so the connections between them are out of step. End the job and "
                    "resume from a checkpoint"
                )


def clear_failure() -> None:
    """Forget a reported failure, after the model was reset. Collective: every rank calls it."""
    b = board()
    b.epoch += 1
    b.failure = None
    _begin_program(b)
    b.sequence.clear()
    b.history.clear()
    b.asked.clear()


def raise_failure(b: _Board, entry: Entry) -> None:
    """Raise :class:`RankFailedError` if another rank of the axis has reported that it failed, or has ended."""
    key = key_of(b, "failure")
    if b.store is None:
        return
    told = b.store.get(key) if b.store.check([key]) else None
    if told:
        failure: dict[str, Any] = json.loads(told)
        if failure["rank"] != b.rank:
            raise RankFailedError(
                f"rank {failure['rank']} failed: {failure['message']} (rank {b.rank} waited in {where(entry)})"
            )
    raise_ended(b, entry)


def raise_ended(b: _Board, entry: Entry, awaited: Sequence[int] | None = None) -> None:
    """Raise :class:`RankFailedError` if another rank has ended its program: one of those that this rank waits for, by
    default one that never entered this collective.
    """
    for rank in entry.axis.ranks if awaited is None else awaited:
        key = key_of(b, f"ended/{rank}")
        if rank == b.rank or b.store is None or not b.store.check([key]):
            continue
        if awaited is not None or json.loads(b.store.get(key)).get(entry.axis.key, 0) <= entry.sequence:
            raise RankFailedError(
                f"rank {rank} has ended its program without {where(entry)}, in which rank {b.rank} waits: every rank "
                "must take the same steps (its own output may say why it ended)"
            )


def raise_gone(b: _Board, entry: Entry) -> None:
    """Raise :class:`RankFailedError` if the process of another rank of the axis, on this machine, is gone. Who waits in
    a collective learns it by the connection; who waits for an answer in the store does not.
    """
    for rank in entry.axis.ranks:
        key = f"shardcore/process/{rank}"
        if b.store is None or rank == b.rank or not b.store.check([key]):
            continue
        space, pid = json.loads(b.store.get(key))
        if space and space == process_space() and not runs(pid):
            raise RankFailedError(
                f"rank {rank} is gone: its process {pid} ended or was killed (its own output says why; a kill without "
                f"a message often means memory ran out). Rank {b.rank} waited for it before {where(entry)}"
            )


def raise_lost_connection(entry: Entry, error: Exception) -> NoReturn:
    """A peer closed its connection: it failed or is gone. Wait shortly for its reason."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        try:
            look_around(entry)
        except RuntimeError as reason:
            if isinstance(reason, RankMismatchError):
                raise reason from error
            break  # the store is gone too
        time.sleep(0.05)
    lost = RankFailedError(
        f"{where(entry)}: the connection to another rank of {list(entry.axis.ranks)} was lost; that process ended or "
        f"was killed (its own output says why; a kill without a message often means memory ran out). Details: {error}"
    )
    try:
        raise lost from error
    finally:
        del lost  # as in `raise_difference`


def published(b: _Board, axis: Axis, kind: str = "at") -> dict[int, dict[int, str]]:
    """What other ranks of the axis have published: the collectives they are in (``at``) or about to enter
    (``next``).
    """
    found: dict[int, dict[int, str]] = {}
    for rank in axis.ranks:
        key = key_of(b, f"{kind}/{axis.key}/{rank}")
        if rank != b.rank and b.store is not None and b.store.check([key]):
            found[rank] = {int(sequence): label for sequence, label in json.loads(b.store.get(key))}
    return found


def raise_difference(b: _Board, axis: Axis, rank: int, difference: tuple[int, str, str], advice: str = "") -> NoReturn:
    """Raise :class:`RankMismatchError` for ``(sequence, this rank's label, the other rank's)``, and tell all ranks."""
    sequence, mine, other = difference
    error = RankMismatchError(
        f"ranks left the common order of collectives on axis {axis.name!r} at number {sequence}: rank {b.rank} runs "
        f"'{mine}', rank {rank} runs '{other}'. Every rank must make the same calls of the model, "
        "backward, step, summon, state_dict, load_state_dict (with the same values) and checkpoints in the same order; "
        f"look for one more on a rank, and for branches that depend on the rank or on its data{advice}"
    )
    report_failure(error)
    try:
        raise error
    finally:
        del error  # the frame and the error would keep one another, and by the frames below the graph of the backward


def first_difference(mine: dict[int, str], theirs: dict[int, str]) -> tuple[int, str, str] | None:
    """The first collective that two ranks have both noted, and noted differently."""
    for sequence in sorted(mine.keys() & theirs.keys()):
        if mine[sequence] != theirs[sequence]:
            return sequence, mine[sequence], theirs[sequence]
    return None


def _absent(entry: Entry) -> str:
    b = board()
    absent = [rank for rank in entry.axis.ranks if rank != b.rank and rank not in published(b, entry.axis)]
    return (
        f"Ranks {absent} never came to a collective of axis {entry.axis.name!r}" if absent else "All ranks wait in it"
    )


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    report_failure(error)
    _excepthook(kind, error, trace)


def _report_end() -> None:
    """The interpreter ends, whatever the exit status: ranks that wait for this one learn how far it came."""
    b = _board
    if b is not None and b.store is not None and b.pid == os.getpid():  # not in a forked child
        with suppress(RuntimeError):
            b.store.set(key_of(b, f"ended/{b.rank}"), json.dumps(b.sequence))


def where(entry: Entry) -> str:
    """The collective as messages name it."""
    return f"collective number {entry.sequence} of axis {entry.axis.name!r}, '{entry.label}'"


def timeout_s() -> float:
    """For how long a rank waits for another one that is alive."""
    return float(os.environ.get("SHARDCORE_TIMEOUT", "1800"))


def key_of(b: _Board, name: str) -> str:
    """The key in the job's store; one of before a reset is never read again."""
    return f"shardcore/{b.epoch}/{name}"
