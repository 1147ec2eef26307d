"""Starting the launcher as a user does, and looking for what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 10
"""No process of a run may live longer than this after the run has failed or was stopped."""

LAUNCHER = [sys.executable, "-m", "shardcore.launch"]

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
"""Loopback alone, and no waiting for a name server: torch asks it for the names of peers."""

WORKER = """
import json, os, signal, subprocess, sys, time
folder, behaviour, *arguments = sys.argv[1:]
rank = int(os.environ["RANK"])
print("hello from", rank, flush=True)
record = {"argv": arguments, "python": sys.executable, "pids": [os.getpid()], "environ": dict(os.environ)}
if behaviour.startswith("linger"):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    for elsewhere in (False, True):  # ignored signals are inherited
        record["pids"].append(subprocess.Popen(sleeper, start_new_session=elsewhere).pid)
path = os.path.join(folder, f"rank{rank}.json")
with open(path + ".new", "w") as file:
    json.dump(record, file)
os.rename(path + ".new", path)
if "-" in behaviour:
    while len([n for n in os.listdir(folder) if n.endswith(".json")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    how, number = behaviour.split("-")[1].split(":")
    if rank == 1 and how == "exit":
        print("the true reason", file=sys.stderr)
        sys.exit(int(number))
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), int(number))
    if rank == 0 and not behaviour.startswith("linger"):
        time.sleep(0.2)  # fails too, because rank 1 has
        sys.exit("a consequence")
if behaviour.startswith("linger"):
    time.sleep(600)
"""


@dataclass
class Run:
    """A launch under way: its process, and the folder in which workers leave their records."""

    process: subprocess.Popen[str]
    folder: Path

    def records(self, num_workers: int) -> list[dict[str, Any]]:
        """What each worker saw, once all have written it."""
        paths = [self.folder / f"rank{rank}.json" for rank in range(num_workers)]
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, "the workers did not start within a minute"
            time.sleep(0.05)
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> tuple[int, str]:
        """(exit status, what was said on standard error)."""
        _, errors = self.process.communicate(timeout=90)
        return self.process.returncode, errors


def launch(*arguments: str, folder: Path, environment: dict[str, str] | None = None) -> Run:
    """Start the launcher with these arguments, in this folder."""
    process = subprocess.Popen(
        [*LAUNCHER, *arguments],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Run(process, folder)


def launch_worker(
    folder: Path,
    behaviour: str,
    *arguments: str,
    options: tuple[str, ...] = ("--nproc-per-node", "2"),
    environment: dict[str, str] | None = None,
) -> Run:
    """Start the launcher on a worker that behaves as told."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "worker.py").write_text(WORKER)
    return launch(*options, "worker.py", str(folder), behaviour, *arguments, folder=folder, environment=environment)


def living(records: list[dict[str, Any]]) -> list[int]:
    """Processes of the run that still live after `LIMIT_S`."""
    pids = [pid for record in records for pid in record["pids"]]
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(_lives(pid) for pid in pids):
        time.sleep(0.1)
    left = [pid for pid in pids if _lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
