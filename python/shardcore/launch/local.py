"""Run a :class:`LaunchPlan` on this machine with torch's elastic agent, and explain how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.launch.plan import LaunchPlan

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_SHUTDOWN_S = 5
"""How long workers may take to end on a signal before they are killed."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(plan: LaunchPlan) -> int:
    """Start the workers, wait for them, and return the exit status for the shell.

    0 if all succeeded; the status of the first worker that failed; 128 + n where signal n ended that worker or this
    process. No worker, nor any process that a worker started, is left behind.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _shorten_shutdown()
    run_id = uuid.uuid4().hex
    try:
        elastic_launch(_elastic_config(plan, run_id), plan.command[0])(*plan.command[1:])
        return 0
    except ChildFailedError as error:
        return _explain(error)
    except SignalException as error:
        print(f"shardcore-launch: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    finally:
        for number in _ENDING_SIGNALS:  # nothing may interrupt the clean-up
            signal.signal(number, signal.SIG_IGN)
        _kill_leftovers(run_id)


def _shorten_shutdown() -> None:
    """Give the other workers seconds, not half a minute, after one has failed; the agent's setting is for signals."""
    from torch.distributed.elastic.multiprocessing import PContext

    original = PContext.close

    def close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = _SHUTDOWN_S) -> None:
        original(context, death_sig, timeout)

    PContext.close = close  # type: ignore[assignment]


def _elastic_config(plan: LaunchPlan, run_id: str) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    logs = DefaultLogsSpecs()
    if plan.log_dir is not None:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        logs = DefaultLogsSpecs(log_dir=str(plan.log_dir), redirects=Std.NONE, tee=Std.ALL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.num_workers,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{plan.port or 0}",
        max_restarts=plan.max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr="localhost",
        logs_specs=logs,
    )


def _explain(error: ChildFailedError) -> int:
    """Say once, last, which worker failed first and how; returns the exit status."""
    rank, failure = error.get_first_failure()
    status = int(failure.exitcode)
    where = f"rank {rank} (local rank {failure.local_rank}, pid {failure.pid}) on {socket.gethostname()}"
    if status >= 0:
        print(f"shardcore-launch: {where} failed with exit code {status}; its error is above", file=sys.stderr)
        return status or 1
    number = signal.Signals(-status)
    hint = ""
    if number == signal.SIGKILL:
        hint = ". Nothing but the system or a person sends SIGKILL: most often memory ran out (see the kernel log)"
    print(f"shardcore-launch: {where} was ended by {number.name}{hint}", file=sys.stderr)
    return 128 + int(number)


def _kill_leftovers(run_id: str) -> None:
    """Kill what workers left behind: every process here that carries this run's id in its environment (Linux)."""
    marker = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        # A process may end, or belong to another user, while it is looked at.
        with contextlib.suppress(OSError):
            if pid != os.getpid() and marker in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
