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

LIMIT_S = 10
"""No process of a run may live longer than this after the run has failed or was stopped."""

WORKER = """
import json, os, signal, subprocess, sys, time
folder, behaviour, *arguments = sys.argv[1:]
rank = int(os.environ["RANK"])
print("hello from", rank, flush=True)
with open(os.path.join(folder, "attempts.txt"), "a") as file:
    file.write(f"{rank}\\n")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
record = {"argv": arguments, "python": sys.executable, **{name: os.environ.get(name) for name in names}}
if behaviour.startswith("linger"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    record["pids"] = [os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid]
path = os.path.join(folder, f"rank{rank}.json")
with open(path + ".new", "w") as file:
    json.dump(record, file)
os.rename(path + ".new", path)
if rank == 1 and "-" in behaviour:
    while len([n for n in os.listdir(folder) if n.endswith(".json")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    how, number = behaviour.split("-")[1].split(":")
    if how == "exit":
        sys.exit(int(number))
    os.kill(os.getpid(), int(number))
    time.sleep(600)
if behaviour.startswith("linger"):
    time.sleep(600)
"""


@dataclass
class Run:
    """A launch under way: its process, and the folder in which workers leave their records."""

    process: subprocess.Popen[str]
    folder: Path

    def records(self, num_workers: int) -> list[dict[str, object]]:
        """What each worker saw, once all have written it."""
        paths = [self.folder / f"rank{rank}.json" for rank in range(num_workers)]
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, "the workers did not start within a minute"
            time.sleep(0.05)
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> tuple[int, str]:
        """(exit status, what it said on standard error)."""
        _, errors = self.process.communicate(timeout=90)
        return self.process.returncode, errors


def launch(
    folder: Path,
    behaviour: str,
    *arguments: str,
    num_workers: str = "2",
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Run:
    """Start the launcher on a worker that behaves as told."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "worker.py"
    script.write_text(WORKER)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from shardcore.launch import main; sys.exit(main())",
            "--nproc-per-node",
            num_workers,
            *options,
            str(script),
            str(folder),
            behaviour,
            *arguments,
        ],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Run(process, folder)


def living(records: list[dict[str, object]]) -> list[int]:
    """Processes of the run that still live after `LIMIT_S`."""
    pids = [pid for record in records for pid in record["pids"]]  # type: ignore[attr-defined]
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
