"""Saves that go on while the model trains.

Each rank copies its share to host memory and writes its file in a thread of its own. No rank talks to another
meanwhile: a rank leaves a note beside its file when that is written or has failed, and the first rank, once it has
seen every note, makes the checkpoint. All ranks learn of it together, in their next call.

What is saved must not change before it is copied. Training changes it in ``optimizer.step()``, which waits for the
copy; so a copy has the time of a forward and a backward.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from shardcore import comm
from shardcore._core import abandon_checkpoint
from shardcore.checkpoint.crew import Crew
from shardcore.errors import CheckpointError

if TYPE_CHECKING:
    from shardcore.checkpoint.writing import Job
    from shardcore.mesh import Axis

_log = logging.getLogger("shardcore")
_POLL_S = 0.02
_KEY = "checkpoint under way"


_unreported: list[Pending] = []
"""Saves that failed and whose error no call has raised."""


def _report_at_exit() -> None:
    """A program that ends without a checkpoint that it asked for has failed."""
    if _unreported:
        for pending in _unreported:
            pending.report()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Pending:
    """One save under way on this rank."""

    def __init__(self, folder: Path, axis: Axis) -> None:
        self._folder = folder
        self._axis = axis
        self._copied = Event()
        self._error: Exception | None = None
        self._thread: Thread | None = None

    def start(self, job: Job) -> None:
        """Begin."""

        def work() -> None:
            try:
                self._run(job)
            except Exception as error:  # noqa: BLE001  # raised by the next call, on every rank
                self._error = error
                _unreported.append(self)
            finally:
                self._copied.set()

        atexit.unregister(_report_at_exit)
        atexit.register(_report_at_exit)
        # Not a daemon: a program that ends waits for its last checkpoint.
        self._thread = Thread(target=work, name="shardcore checkpoint")
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Return when nothing of the model is read any more."""
        self._copied.wait()

    def finish(self) -> None:
        """Wait for the end of this rank's part.

        Raises:
            Exception: what went wrong.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            _unreported.remove(self)
            raise self._error

    def report(self) -> None:
        """Say what went wrong where no call is left to raise it."""
        if self._error is not None:
            comm.report_failure(self._error)
            _log.error("a checkpoint in %s could not be written: %s", self._folder.parent, self._error)

    def _run(self, job: Job) -> None:
        try:
            job.copy()
            self._copied.set()
            self._leave(job.write())
        except Exception:
            if self._axis.rank == 0:
                abandon_checkpoint(job.run, job.tag)
            else:
                self._leave_failure(job.file)
            raise
        if self._axis.rank == 0:
            self._complete(job)

    def _complete(self, job: Job) -> None:
        try:
            job.commit([self._note_of(rank) for rank in self._axis.ranks])
        except Exception:
            abandon_checkpoint(job.run, job.tag)
            raise

    def _leave(self, written: list[Any]) -> None:
        path = self._path(self._axis.ranks[self._axis.rank])
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(written))
        aside.rename(path)

    def _leave_failure(self, file: str) -> None:
        """An empty note, for which there is room once this rank's file is gone, however full the disk is."""
        with suppress(OSError):
            (self._folder / file).unlink(missing_ok=True)
            self._path(self._axis.ranks[self._axis.rank]).with_suffix(".failed").touch()

    def _note_of(self, rank: int) -> list[Any]:
        """What that rank has written, once it has."""
        path = self._path(rank)
        deadline = time.monotonic() + comm.timeout_s()
        while not path.exists():
            if path.with_suffix(".failed").exists():
                raise CheckpointError(f"rank {rank} could not write its file of {self._folder}; its message says why")
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {rank} never finished writing its file of {self._folder}")
            time.sleep(_POLL_S)
        written: list[Any] = json.loads(path.read_text())
        path.unlink()
        return written

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.note"


def remember(crew: Crew, pending: Pending) -> None:
    """Keep the save under way of these ranks."""
    _attached(crew.axis)[_KEY] = pending


def settle(crew: Crew) -> None:
    """Wait for the save under way, if there is one. Collective.

    Raises:
        Exception: on every rank, if it failed on any; of this rank's class, or that of the first that failed.
    """
    pending: Pending | None = _attached(crew.axis).pop(_KEY, None)
    if any(crew.tell("whether a save is under way", lambda: pending is not None)):
        crew.do("the save under way", lambda: pending.finish() if pending is not None else None)


def _attached(axis: Axis) -> dict[str, Any]:
    return axis.mesh.attached if axis.mesh is not None else {}
