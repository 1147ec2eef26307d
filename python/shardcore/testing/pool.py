"""The pool of rank processes: forked from a server that has torch loaded, kept from test to test.

A run that fails in any way costs its processes: they are killed and forked anew, so a failed test never leaves
state to the next one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcore.testing.messages import FunctionRef, HostStore, Job, JoinStore, Release, current_warning_filters, loads
from shardcore.testing.process import RankProcess, wait_for_any
from shardcore.testing.report import RankReport, SpmdError

_PRELOAD = ["pytest", "shardcore.testing.preload"]
_SETTLE_SECONDS = 30.0


class SpmdSkip(Exception):
    """The body called ``pytest.skip`` on some rank, and no rank failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One call of a function on several ranks."""

    function: FunctionRef
    """What to call."""
    arguments: bytes
    """Pickled ``(args, kwargs)``."""
    world: int
    """Number of ranks."""
    backend: str | None
    """Backend of the default process group; ``None`` starts no group."""
    timeout: float
    """Seconds for the whole run."""
    grace: float
    """Seconds that the other ranks get once one is through without returning."""

    def collect(self, ranks: Sequence[RankProcess], seconds: float) -> list[RankReport]:
        """Every rank's report, in order; raises ``SpmdError`` if any rank failed."""
        reports: dict[int, RankReport] = {}
        deadline, limit = time.monotonic() + seconds, f"at the time limit of {seconds:g} s"
        while len(reports) < len(ranks):
            waiting = [process for process in ranks if process.rank not in reports]
            ready = wait_for_any(waiting, deadline - time.monotonic())
            if not ready:
                reports |= _hung(waiting, limit)
            for process in ready:
                report = reports[process.rank] = process.receive()
                if report.kind != "ok" and time.monotonic() + self.grace < deadline:
                    deadline = time.monotonic() + self.grace
                    limit = f"{self.grace:g} s after rank {process.rank} ended"
        ordered = [reports[process.rank] for process in ranks]
        if any(report.failed for report in ordered):
            raise SpmdError(self.function.qualname, ordered)
        return ordered


class Pool:
    """All rank processes of this test process; grows to the largest world asked for."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shardcore-testing-"))
        self._ranks: list[RankProcess] = []
        self._port = 0
        self._number = 0
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)

    def run(self, run: Run) -> list[Any]:
        """Results by rank. Raises ``SpmdError`` or ``SpmdSkip``."""
        try:
            reports = self._execute(run)
        except BaseException:
            self.kill()
            raise
        skips = [report for report in reports if report.kind == "skip"]
        if skips:
            raise SpmdSkip(min(skips, key=lambda report: report.at).message)
        return [loads(report.value) for report in reports]

    def kill(self) -> None:
        """End all processes by force; the next run starts new ones."""
        for process in self._ranks:
            process.kill()
        self._ranks.clear()

    def close(self) -> None:
        """End all processes and remove the pool's files."""
        for process in self._ranks:
            process.dismiss()
        self._ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _execute(self, run: Run) -> list[RankReport]:
        self._grow(run)
        self._number += 1
        ranks = self._ranks[: run.world]
        for process in ranks:
            process.clear()
        port = self._port_for(run)
        filters = current_warning_filters()
        for process in ranks:
            process.send(
                Job(
                    function=run.function,
                    arguments=run.arguments,
                    rank=process.rank,
                    world=run.world,
                    number=self._number,
                    backend=run.backend,
                    port=port,
                    timeout=run.timeout,
                    sys_path=tuple(sys.path),
                    filters=filters,
                )
            )
        reports = run.collect(ranks, run.timeout)
        # Only now, since a rank that closes its connections early would disturb a collective of a slower one.
        for process in ranks:
            process.send(Release())
        run.collect(ranks, _SETTLE_SECONDS)
        _echo(ranks)
        return reports

    def _grow(self, run: Run) -> None:
        """Start the processes that are missing, and connect them to the pool's store, which rank 0 hosts."""
        new = [RankProcess(rank, self._folder) for rank in range(len(self._ranks), run.world)]
        self._ranks += new
        if new and new[0].rank == 0:
            self._port = self._host_store(run)
        for process in new:
            process.send(JoinStore(port=self._port))
        run.collect(new, _SETTLE_SECONDS)

    def _host_store(self, run: Run) -> int:
        self._ranks[0].send(HostStore())
        (report,) = run.collect(self._ranks[:1], _SETTLE_SECONDS)
        return int(loads(report.value))

    def _port_for(self, run: Run) -> int | None:
        if run.backend is not None:
            return self._port  # the group gets its own part of the pool's store
        return self._host_store(run) if run.world > 1 else None


def _hung(waiting: Sequence[RankProcess], limit: str) -> dict[int, RankReport]:
    for process in waiting:
        process.request_stacks()
    return {process.rank: process.report_hang(limit) for process in waiting}


def _echo(ranks: Iterable[RankProcess]) -> None:
    for process in ranks:
        text = process.output()
        if text:
            print(f"----- rank {process.rank} -----\n{text.rstrip()}")


_pool: Pool | None = None


def shared_pool() -> Pool:
    """The pool of this process, started at first use."""
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(shutdown)
    return _pool


def shutdown() -> None:
    """End the rank processes of this process, if any; a later run starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
        atexit.unregister(shutdown)
