"""Keeper of one rank: starts the rank's program, passes its output on, and leaves nothing of it behind.

Run as a file, by path and in isolated mode, with the standard library alone, so that it starts at once and nothing in
the user's environment changes what it does. It ends as the program ended: with its exit code, or by its signal. If
the program fails, or the keeper is told to stop, or the launcher is gone, every process that the program started is
ended too: asked by a signal first, and killed after a few seconds.

The one argument is a JSON file of orders: the command, the folder for output if any, and the count of restarts. The
report of the rank's end is written beside it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

STOP_SECONDS = 3.0
"""Time between the request to stop and the kill."""

_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 1.0
_TAIL_NBYTES = 32768
_PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """One rank's program, from start to end."""

    def __init__(self, command: list[str], log_dir: str | None, environment: dict[str, str]) -> None:
        self._launcher = os.getppid()
        self._stop_signal: int | None = None
        self._tail = b""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, self._on_signal)
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake_up_by_signals(), selectors.EVENT_READ, None)
        adopt_orphans()
        self._child = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE if log_dir else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stem = Path(log_dir) / f"rank{environment.get('RANK', '0')}" if log_dir else None
        self._pass_on(self._child.stderr, 2, stem and stem.with_suffix(".err"))
        if self._child.stdout is not None:
            self._pass_on(self._child.stdout, 1, stem and stem.with_suffix(".out"))

    def run(self) -> dict[str, Any]:
        """Wait for the end and report it."""
        stopped = False
        deadline = float("inf")
        while self._child.poll() is None:
            self._copy_output(_POLL_SECONDS)
            if os.getppid() != self._launcher and self._stop_signal is None:
                self._stop_signal = signal.SIGTERM
            if self._stop_signal is not None and not stopped:
                stopped = True
                deadline = time.monotonic() + STOP_SECONDS
                self._signal_group(self._stop_signal)
            if time.monotonic() > deadline:
                self._signal_group(signal.SIGKILL)
        ended = time.monotonic()
        if stopped or self._child.returncode != 0:
            self._end_descendants(min(deadline, ended + STOP_SECONDS))
        drained = time.monotonic() + _DRAIN_SECONDS  # a child that was left running may write for ever
        while self._copy_output(0.0) and time.monotonic() < drained:
            pass
        return {
            "pid": self._child.pid,
            "code": self._child.returncode,
            "stopped": stopped,
            "ended": ended,
            "peak_nbytes": peak_resident_nbytes(),
            "stderr": self._tail.decode(errors="replace"),
        }

    def _on_signal(self, signum: int, frame: object) -> None:
        self._stop_signal = signum

    def _pass_on(self, stream: IO[bytes] | None, to: int, path: Path | None) -> None:
        if stream is not None:
            os.set_blocking(stream.fileno(), False)
            log = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._selector.register(stream, selectors.EVENT_READ, (to, log))

    def _copy_output(self, seconds: float) -> bool:
        """Pass on what the program has written, after waiting up to ``seconds`` for it; whether there was any."""
        found = False
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 65536)
            if key.data is None:
                continue  # a signal woke the selector: a child ended, or a request to stop came
            found = True
            if not data:
                self._selector.unregister(key.fileobj)
                continue
            to, log = key.data
            write_all(to, data)
            if log is not None:
                write_all(log, data)
            if to == 2:
                self._tail = (self._tail + data)[-_TAIL_NBYTES:]
        return found

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signum)

    def _end_descendants(self, deadline: float) -> None:
        """End what the program has started, in its own process group or out of it."""
        self._signal_group(signal.SIGTERM)
        signal_all(descendants(), signal.SIGTERM)
        while (alive := descendants()) and time.monotonic() < deadline:
            self._copy_output(0.05)
            reap()
        self._signal_group(signal.SIGKILL)
        signal_all(alive, signal.SIGKILL)
        reap()


def wake_up_by_signals() -> int:
    """A descriptor that becomes readable with each signal, the end of a child among them.

    The moment at which a rank ended is thus known to the millisecond: it tells a cause from its consequences.
    """
    readable, writable = os.pipe()
    for end in (readable, writable):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    return readable


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Process ids of all live descendants, where the system has a process folder to read them from."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        waiting += (below := children.get(waiting.pop(), []))
        found += below
    return found


def signal_all(pids: list[int], signum: int) -> None:
    """Send the signal to every process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def reap() -> None:
    """Collect adopted processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def peak_resident_nbytes() -> int:
    """Largest resident memory of the processes waited for so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_all(to: int, data: bytes) -> None:
    """Write ``data``; what cannot be written any more (a closed pipe) is dropped."""
    with suppress(OSError):
        while data:
            data = data[os.write(to, data) :]


def not_started(message: str) -> dict[str, Any]:
    """Report of a rank whose program could not be started: the exit code is the shell's for that."""
    ended = time.monotonic()
    return {"pid": 0, "code": 127, "stopped": False, "ended": ended, "peak_nbytes": 0, "stderr": message}


def end_as(code: int) -> None:
    """End this process as one with return code ``code`` ended: negative is a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code if code >= 0 else 128 - code)


def main(orders_path: Path) -> None:
    """Keep one rank."""
    orders = json.loads(orders_path.read_text())
    environment = dict(os.environ)
    environment["TORCHELASTIC_RESTART_COUNT"] = str(orders["restart_count"])
    environment["TORCHELASTIC_MAX_RESTARTS"] = str(orders["max_restarts"])
    try:
        report = Keeper(orders["command"], orders["log_dir"], environment).run()
    except OSError as error:
        report = not_started(f"cannot start {orders['command'][0]!r}: {error.strerror}")
    path = orders_path.with_name(f"rank{environment['RANK']}.json")
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)
    end_as(report["code"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
