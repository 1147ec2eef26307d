"""Start the plan's ranks on this machine, on torch's elastic agent, and see them through to the end.

The agent starts one keeper per rank (``rank_process``). Restarts are made here, each with an agent of its own: the
agent's own restarts keep the store of the failed attempt, whose stale keys the new ranks would read.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import sys
import tempfile
import uuid
from pathlib import Path

import torch
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardcore.errors import LaunchError
from shardcore.launch import rank_process
from shardcore.launch.arguments import Options
from shardcore.launch.outcome import RankEnd, describe, exit_status, first_failure, last_words, read_reports
from shardcore.launch.plan import LaunchPlan, num_cores, plan_local
from shardcore.launch.signals import StopSignals

_PORT_ATTEMPTS = 5


def launch(options: Options, signals: StopSignals) -> int:
    """Run the ranks and return the exit status. Raises ``LaunchError`` if they could not be started."""
    plan = plan_local(options, os.environ, num_gpus=torch.cuda.device_count(), num_cores=num_cores())
    if plan.log_dir is not None:
        Path(plan.log_dir).mkdir(parents=True, exist_ok=True)
    os.environ.update(plan.hosts[0].environment)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a launcher inside a rank is no client of its outer store
    logging.disable(logging.CRITICAL)  # the agent's running commentary; what matters is said below, once
    signals.raise_as(lambda signum: SignalException(f"stopped by {signum.name}", signum))
    with tempfile.TemporaryDirectory(prefix="shardcore-launch-") as folder:
        return _attempts(plan, folder)


def _attempts(plan: LaunchPlan, folder: str) -> int:
    for attempt in range(plan.max_restarts + 1):
        reports = Path(folder) / f"attempt{attempt}"
        reports.mkdir()
        if _run_agent(plan, reports, attempt):
            return 0
        gc.collect()  # the attempt's store goes with the agent, and its port with the store
        failure = _failure(plan, reports)
        _say(*last_words(failure))
        _say(f"shardcore-launch: {describe(failure)}" + ("; the other ranks were stopped" if plan.world > 1 else ""))
        if attempt < plan.max_restarts:
            _say(f"shardcore-launch: all ranks start anew ({attempt + 1} of {plan.max_restarts})")
    return exit_status(failure)


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _failure(plan: LaunchPlan, reports: Path) -> RankEnd:
    failure = first_failure(read_reports(plan, reports))
    if failure is None:
        raise LaunchError(f"ranks failed on {socket.gethostname()}, but none left a report; see their output above")
    return failure


def _run_agent(plan: LaunchPlan, reports: Path, attempt: int) -> bool:
    """One attempt; whether all ranks ended well."""
    # By file, since the agent substitutes what looks like a macro in the arguments that it passes on.
    orders = reports / "orders.json"
    orders.write_text(
        json.dumps(
            {
                "command": plan.command,
                "log_dir": plan.log_dir,
                "restart_count": attempt,
                "max_restarts": plan.max_restarts,
            }
        )
    )
    keeper = [sys.executable, "-I", "-S", str(rank_process.__file__), str(orders)]
    for remaining in reversed(range(_PORT_ATTEMPTS)):
        port = plan.master_port or _free_port()
        try:
            elastic_launch(_config(plan, port), keeper[0])(*keeper[1:])
        except ChildFailedError:
            return False
        except DistNetworkError as error:
            if plan.master_port is not None:
                raise _port_in_use(port, error) from error
            if not remaining:  # each time, someone took the free port before it was bound
                raise LaunchError(f"no free port for rank 0's store in {_PORT_ATTEMPTS} attempts: {error}") from error
        else:
            return True
    return False


def _config(plan: LaunchPlan, port: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.hosts[0].num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static",
        rdzv_endpoint=f"{plan.master_addr}:{port}",
        rdzv_configs={"rank": 0, "timeout": 60},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _port_in_use(port: int, error: DistNetworkError) -> LaunchError:
    return LaunchError(
        f"port {port} cannot be used for rank 0's store ({error}); name another with --master-port, "
        "or leave the option out to get a free one"
    )
