"""One rank process as the test process sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shardcore.testing import worker
from shardcore.testing.messages import Request
from shardcore.testing.report import RankReport

_STACK_SECONDS = 2.0


class RankProcess:
    """A worker process, its connection, and the files where it leaves its output and its stacks."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self._stack_path = folder / f"rank{rank}.stacks"
        self._log_path = folder / f"rank{rank}.log"
        for path in (self._stack_path, self._log_path):
            path.write_bytes(b"")
        context = multiprocessing.get_context("forkserver")
        self.connection, remote = context.Pipe()
        # Not a daemon in multiprocessing's sense: those may not have children, such as a data loader's.
        self._process = context.Process(
            target=worker.worker_main,
            args=(rank, remote, str(self._stack_path), str(self._log_path)),
            name=f"rank{rank}",
        )
        self._process.start()
        remote.close()

    @property
    def handles(self) -> tuple[Connection, int]:
        """What becomes ready when the process answers or ends."""
        return self.connection, self._process.sentinel

    def send(self, request: Request) -> None:
        """Hand the request over; a process that is gone is noticed by who waits for the answer."""
        with contextlib.suppress(OSError):
            self.connection.send(request)

    def receive(self) -> RankReport:
        """The answer, with what the process printed; call when one of ``handles`` is ready."""
        try:
            report: RankReport = self.connection.recv()
        except (EOFError, OSError):
            message = self._death()
            return self._report("died", message, _without_harness(self._stack_path.read_text(errors="replace")))
        return report if report.kind == "ok" else replace(report, output=self.output())

    def output(self) -> str:
        """What the process printed since ``clear``."""
        return self._log_path.read_text(errors="replace")

    def clear(self) -> None:
        """Forget output and stacks so far."""
        for path in (self._log_path, self._stack_path):
            os.truncate(path, 0)

    def request_stacks(self) -> None:
        """Make the process dump its stacks."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, worker.STACK_SIGNAL)

    def report_hang(self, limit: str) -> RankReport:
        """The report of a process that passed ``limit``, with the stacks that ``request_stacks`` asked for."""
        deadline = time.monotonic() + _STACK_SECONDS
        text, last = "", None
        while time.monotonic() < deadline and (not text or text != last):
            last = text
            time.sleep(0.05)
            text = self._stack_path.read_text(errors="replace")
        text = _without_harness(text) or "(the process did not answer the request for its stacks)"
        return self._report("hung", limit, text)

    def kill(self) -> None:
        """End the process now, whatever it does."""
        self.connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()

    def dismiss(self) -> None:
        """End the process by closing its connection, and by force if it is busy."""
        self.connection.close()
        self._process.join(2)
        self.kill()

    def _death(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            return "its connection closed"
        if code < 0:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def _report(self, kind: str, message: str, stacks: str) -> RankReport:
        return RankReport(
            rank=self.rank,
            kind="died" if kind == "died" else "hung",
            at=time.monotonic(),
            message=message,
            trace=stacks,
            output=self.output(),
        )


def wait_for_any(processes: Iterable[RankProcess], seconds: float) -> list[RankProcess]:
    """The processes that answered or ended, in rank order; none if that takes longer than ``seconds``."""
    owner = {handle: process for process in processes for handle in process.handles}
    ready = {owner[handle].rank: owner[handle] for handle in wait(list(owner), max(seconds, 0.0))}  # type: ignore[index]
    return [ready[rank] for rank in sorted(ready)]


def _without_harness(stacks: str) -> str:
    """Cut what lies below the test's body, from the harness's own file on, out of each thread's stack."""
    kept: list[str] = []
    below = False
    for line in stacks.splitlines():
        if not line.startswith("  "):
            below = False
        below = below or f'File "{worker.__file__}"' in line
        if not below:
            kept.append(line)
    return "\n".join(kept).strip()
