"""The rank process: waits for requests, runs each job in a fresh process group, reports how it ended."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardcore.testing.messages import (
    HostStore,
    Job,
    JoinStore,
    Release,
    Request,
    apply_warning_filters,
    dumps,
    loads,
)
from shardcore.testing.report import RankReport

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write all its Python stacks to its stack file, also while it is blocked in C++."""

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


def worker_main(rank: int, connection: Connection, stack_path: str, log_path: str) -> None:
    """Serve requests from ``connection`` until it closes. Both paths are files of this worker alone."""
    _prepare_process(stack_path, log_path)
    worker = Worker(rank)
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(worker.answer(request))


def on_rank_error(exc: BaseException) -> None:
    """Tell the other ranks that this one failed, where ``shardcore.comm`` offers a way to."""
    if importlib.util.find_spec("shardcore.comm") is None:
        return
    comm = importlib.import_module("shardcore.comm")
    report: Callable[[BaseException], None] | None = getattr(comm, "report_failure", None)
    if report is not None:
        report(exc)


class Worker:
    """State of one rank process between requests."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._servers: list[TCPStore] = []  # on rank 0: the pool's, then the current job's own
        self._store: TCPStore | None = None
        self._environ: dict[str, str] = {}
        self._unraisable: list[str] = []

    def answer(self, request: Request) -> RankReport:
        """Do what ``request`` asks; never raises."""
        try:
            match request:
                case HostStore():
                    self._servers.append(TCPStore(_HOST, 0, is_master=True, wait_for_workers=False))
                    return self._ok(self._servers[-1].port)
                case JoinStore():
                    self._store = TCPStore(_HOST, request.port, is_master=False)
                case Job():
                    return self._ok(self._run(request))
                case Release():
                    self._release()
            return self._ok()
        except BaseException as exc:
            report = self._failure(exc)
            if report.kind == "error":
                _leave_after_error(exc)
            return report

    def _run(self, job: Job) -> Any:
        self._enter(job)
        body = job.function.load()
        with warnings.catch_warnings():
            apply_warning_filters(job.filters)
            args, kwargs = loads(job.arguments)
            value = body(*args, **kwargs)
            self._raise_unraisable()
        return value

    def _enter(self, job: Job) -> None:
        self._environ = dict(os.environ)
        self._unraisable.clear()
        sys.unraisablehook = self._note_unraisable
        sys.path[:] = job.sys_path
        random.seed(0)
        torch.manual_seed(0)
        if job.port is not None:
            os.environ.update(_rank_environ(job))
        if job.backend is not None and self._store is not None:
            # The group's own limit is far above the harness's, so that a hang is reported with every rank's stack.
            limit = timedelta(seconds=job.timeout + 120)
            store = PrefixStore(f"run{job.number}", self._store)
            store.set_timeout(limit)
            dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world, timeout=limit)

    def _release(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        while gc.collect():  # what a graph of autograd held is garbage only once the graph is gone
            pass
        self._raise_unraisable()
        _check_clean()
        del self._servers[1:]
        os.environ.clear()
        os.environ.update(self._environ)

    def _ok(self, value: object = None) -> RankReport:
        return RankReport(rank=self._rank, kind="ok", at=time.monotonic(), value=dumps(value))

    def _failure(self, exc: BaseException) -> RankReport:
        at = time.monotonic()
        if _is_skip(exc):
            return RankReport(rank=self._rank, kind="skip", at=at, message=str(exc))
        tb = exc.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
            tb = tb.tb_next
        trace = "".join(traceback.format_exception(type(exc), exc, tb or exc.__traceback__))
        return RankReport(
            rank=self._rank, kind="error", at=at, error_type=type(exc).__name__, message=str(exc), trace=trace
        )

    def _note_unraisable(self, args: Any) -> None:
        where = args.err_msg or f"Exception ignored in {args.object!r}"
        self._unraisable.append(where + "\n" + "".join(traceback.format_exception(args.exc_value)))

    def _raise_unraisable(self) -> None:
        if self._unraisable:
            raise RuntimeError("an exception could not be raised where it happened:\n" + "\n".join(self._unraisable))


def _leave_after_error(exc: BaseException) -> None:
    """Close the process group: peers blocked in a collective see the connection end, as if this process had."""
    try:
        on_rank_error(exc)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        traceback.print_exc()


def _prepare_process(stack_path: str, log_path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then ends its workers
    _die_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    stacks = os.open(stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    # torch asks the name server for the name of each peer, for its messages: one that is slow must not slow the tests.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    gc.freeze()  # what the fork server preloaded is not garbage: keep each job's collection short


def _die_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _rank_environ(job: Job) -> dict[str, str]:
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_WORLD_SIZE": str(job.world),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(job.port),
        # Rank 0 hosts the store already: env:// is to connect to it on every rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _is_skip(exc: BaseException) -> bool:
    pytest = sys.modules.get("pytest")
    return pytest is not None and isinstance(exc, pytest.skip.Exception)


def _check_clean() -> None:
    """Raise if the job changed something that the next job on this process would inherit."""
    expected = {
        "torch.get_default_dtype()": (torch.get_default_dtype(), torch.float32),
        "torch.get_default_device()": (torch.get_default_device(), torch.device("cpu")),
        "torch.is_grad_enabled()": (torch.is_grad_enabled(), True),
        "torch.is_inference_mode_enabled()": (torch.is_inference_mode_enabled(), False),
        "torch.get_num_threads()": (torch.get_num_threads(), 1),
        "torch.are_deterministic_algorithms_enabled()": (torch.are_deterministic_algorithms_enabled(), False),
    }
    found = [f"{what} is {now}, not {before}" for what, (now, before) in expected.items() if now != before]
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(1.0)
            if thread.is_alive():
                found.append(f"thread {thread.name!r} still runs")
    if found:
        raise RuntimeError("the test left state behind in its rank process: " + "; ".join(found))
