"""The disk that a test needs; and small file systems of their own, for faults that a healthy disk does not show, which
need root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardcore.offload import IoEngine

MIB = 1 << 20


def disk_nbytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to disks, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def need_disk(folder: Path, nbytes: int) -> None:
    """Skips the test where the folder has not this much space, or lies in memory."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        pytest.skip(f"{folder} has {free} bytes free, and the test needs {nbytes}")
    _, before = disk_nbytes()
    with IoEngine() as engine:
        engine.write(folder / "probe", torch.zeros(4096, dtype=torch.uint8)).wait()
    if disk_nbytes()[1] == before:
        pytest.skip(f"{folder} is on no disk")


def run(*command: object) -> None:
    """Runs a command; skips the test where this machine does not allow it."""
    try:
        subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine mounts nothing for tests: {error}")


@contextlib.contextmanager
def mounted(kind: str, folder: Path, num_mebibytes: int) -> Iterator[Path]:
    """A file system of that size: ``ext4`` on a file (``<folder>.img``), or ``tmpfs``."""
    if os.getuid() != 0:
        pytest.skip("only root may mount")
    folder.mkdir()
    if kind == "ext4":
        image = folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(num_mebibytes * MIB)
        run("mkfs.ext4", "-q", "-m", "0", image)
        run("mount", "-o", "loop", image, folder)
    else:
        run("mount", "-t", "tmpfs", "-o", f"size={num_mebibytes}m", "none", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False, timeout=60)
