"""A save may be killed at any moment: the last complete checkpoint loads, and training goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CRASHING = Path(__file__).with_name("crashing.py")


def crash(folder: Path, count: int, seed: int, timeout: float) -> list[str]:
    """What happened in each trial."""
    command = [sys.executable, "-W", "ignore", str(CRASHING), str(folder), str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def assert_various(lines: list[str], least: int) -> None:
    """The kills came at different moments: within saves of different steps, of which some were left unfinished."""
    assert len({line.rpartition(" ")[2] for line in lines}) >= least, lines
    assert any(".saving-" in line for line in lines), lines


@pytest.mark.timeout(300)
def test_g7_a_save_is_killed_at_random_moments(tmp_path: Path) -> None:
    lines = crash(tmp_path / "run", 20, seed=1, timeout=280)
    assert len(lines) == 20
    assert_various(lines, 2)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_g7_a_save_is_killed_at_many_random_moments(tmp_path: Path) -> None:
    lines = crash(tmp_path / "run", 200, seed=2, timeout=3500)
    assert len(lines) == 200
    assert_various(lines, 4)
