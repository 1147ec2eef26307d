"""What to start where: a value, made from the options and the environment, that a starter of processes obeys.

One machine is a plan with one host. A starter for several machines takes the same plan, with more hosts.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardcore.errors import LaunchError
from shardcore.launch.arguments import Options

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """The part of one machine."""

    host: str
    """Name of the machine."""
    num_ranks: int
    """Ranks that run on it."""
    environment: Mapping[str, str]
    """Variables that its ranks have beyond those of the launcher, or in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank among those of its host."""
    host: str
    """Name of the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Hosts in order of ranks, and the command that every rank runs."""

    hosts: tuple[HostPlan, ...]
    """The machines; ranks are numbered through them in this order."""
    command: tuple[str, ...]
    """Program and arguments, each an argument of its own: they pass through no shell."""
    master_addr: str
    """Address at which rank 0's store is found."""
    master_port: int | None
    """Its port; ``None`` lets the first host choose a free one."""
    max_restarts: int
    """How often all ranks are started anew after a failure."""
    log_dir: str | None
    """Folder for each rank's output, or ``None``."""

    @property
    def world(self) -> int:
        """Number of ranks on all hosts."""
        return sum(host.num_ranks for host in self.hosts)

    def places(self) -> list[RankPlace]:
        """All ranks in order."""
        pairs = [(host.host, local_rank) for host in self.hosts for local_rank in range(host.num_ranks)]
        return [RankPlace(rank=rank, local_rank=local, host=host) for rank, (host, local) in enumerate(pairs)]


def plan_local(options: Options, environment: Mapping[str, str], *, num_gpus: int, num_cores: int) -> LaunchPlan:
    """The plan for this machine with ``num_gpus`` visible GPUs and ``num_cores`` usable CPU cores.

    Raises ``LaunchError`` if GPUs or slots are asked for that are not there.
    """
    num_ranks = _num_ranks(options, num_gpus, num_cores)
    extra: dict[str, str] = {}
    if options.slots is not None:
        extra |= _visible_devices(options.slots, environment)
    if "OMP_NUM_THREADS" not in environment:
        extra["OMP_NUM_THREADS"] = str(max(1, num_cores // num_ranks))
    return LaunchPlan(
        hosts=(HostPlan(host=socket.gethostname(), num_ranks=num_ranks, environment=extra),),
        command=_command(options),
        master_addr=options.master_addr,
        master_port=options.master_port,
        max_restarts=options.max_restarts,
        log_dir=options.log_dir,
    )


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_ranks(options: Options, num_gpus: int, num_cores: int) -> int:
    if isinstance(options.num_ranks, int):
        return options.num_ranks
    if options.slots is not None:
        return len(options.slots)
    if options.num_ranks == "gpu" and num_gpus == 0:
        raise LaunchError("--nproc-per-node gpu: no GPU is visible to torch; use cpu, auto or a number of ranks")
    return num_gpus if num_gpus and options.num_ranks != "cpu" else num_cores


def _visible_devices(slots: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Slots count within the devices that the environment shows already, whose names (also UUIDs) are kept."""
    found: dict[str, str] = {}
    for variable in _VISIBLE:
        if variable in environment:
            devices = [device.strip() for device in environment[variable].split(",")]
            missing = [slot for slot in slots if int(slot) >= len(devices)]
            if missing:
                raise LaunchError(
                    f"--include: no slot {missing[0]} among {variable}={environment[variable]}, "
                    f"which has slots 0 to {len(devices) - 1}"
                )
            found[variable] = ",".join(devices[int(slot)] for slot in slots)
    return found or {"CUDA_VISIBLE_DEVICES": ",".join(slots)}


def _command(options: Options) -> tuple[str, ...]:
    program = {
        "script": (sys.executable, "-u", options.program),
        "module": (sys.executable, "-u", "-m", options.program),
        "program": (options.program,),
    }[options.run_as]
    return (*program, *options.arguments)
