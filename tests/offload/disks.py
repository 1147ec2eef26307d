"""Small file systems of their own, for faults that a healthy disk does not show. They need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20


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
