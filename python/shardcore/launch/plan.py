"""What to start where: the seam between reading the command line and starting processes."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from shardcore.errors import LaunchError


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Workers of one machine, as decided from the command line."""

    num_workers: int
    """Processes to start here; each is one rank."""
    command: tuple[str, ...]
    """Program and arguments of every worker, passed on as they are."""
    port: int | None = None
    """TCP port on which the workers meet; None takes a free one."""
    max_restarts: int = 0
    """How often all workers are started again after one has failed."""
    log_dir: Path | None = None
    """Keep each worker's output in files below this folder; None leaves it on the terminal."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to set for the workers unless the caller's environment has them."""


def worker_command(script: str, arguments: list[str], *, as_module: bool, with_python: bool) -> tuple[str, ...]:
    """How a worker is started: by this Python, from a file or (``python -m``) a module, or as a program of its own.

    Raises:
        LaunchError: the script file does not exist.
    """
    if as_module:
        return (sys.executable, "-u", "-m", script, *arguments)
    if not with_python:
        return (script, *arguments)
    if not Path(script).is_file():
        raise LaunchError(
            f"the script {script!r} does not exist in {Path.cwd()}; give its path, or use -m for a module"
        )
    return (sys.executable, "-u", script, *arguments)


def count_workers(asked: str) -> int:
    """The number of workers for ``--nproc-per-node``: a number, "gpu", "cpu", or "auto" (GPUs, else CPU cores).

    Raises:
        LaunchError: not a positive number, or "gpu" without GPUs.
    """
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if asked not in ("auto", "gpu", "cpu"):
        raise LaunchError(f"--nproc-per-node {asked!r}: expected a positive number, 'auto', 'gpu' or 'cpu'")
    num_gpus = 0 if asked == "cpu" else _num_gpus()
    if asked == "gpu" and num_gpus == 0:
        raise LaunchError("--nproc-per-node gpu: no CUDA device is visible here; use 'auto' or 'cpu'")
    return num_gpus or num_cores()


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_environment(num_workers: int) -> dict[str, str]:
    """CPU threads are shared out, since ranks that each take all cores slow one another down."""
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // num_workers))}


def check_port(port: int) -> None:
    """Raise :class:`LaunchError` naming the port if another program listens on it."""
    if not 0 < port < 65536:
        raise LaunchError(f"--master-port {port}: expected a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"--master-port {port} is in use ({error.strerror}); choose another, or leave it out to take a free one"
            ) from None


def _num_gpus() -> int:
    import torch  # only here, so that --help is fast and works without torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
