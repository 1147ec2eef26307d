"""The machine a figure was measured on, and how quiet it was meanwhile."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def describe() -> dict[str, str | int | float]:
    """CPU model, cores, memory (GiB), kernel, Python and torch: what a figure is worth nothing without."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def slug() -> str:
    """The hardware as a part of a file name, e.g. ``amd-epyc-2-cores``."""
    words = str(describe()["cpu"]).lower().replace("(r)", "").replace("(tm)", "").split()
    kept = [word for word in words if word.isalnum() and word not in ("cpu", "processor")]
    return "-".join([*kept[:4], str(describe()["cores"]), "cores"])


def disk_nbytes() -> tuple[int, int]:
    """Bytes that this process, with all its threads, has had read from and written to disks: the kernel's account. What
    the page cache answers, and files in memory, count nothing.
    """
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


class Bystanders:
    """How much of the machine's CPU time others took while processes of ours were measured.

    Others are all processes but those given, this one, and their finished children. Time stolen by a
    hypervisor counts too.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = [*pids, os.getpid()]
        self._start = self._read()

    def share(self) -> float:
        """Others' part of the CPU time that the machine had since this object was made, 0 to 1."""
        busy, total, ours = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(0.0, min(1.0, (busy - ours) / max(total, 1.0)))

    def _read(self) -> tuple[float, float, float]:
        """(busy, total, ours) in clock ticks since boot; busy includes stolen time."""
        ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle, sum(ticks), sum(map(_used, self._pids))


def _used(pid: int) -> float:
    """Clock ticks that a process and its finished children have used; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(sum(int(text) for text in fields[11:15]))


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
