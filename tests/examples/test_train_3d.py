"""The example in three dimensions as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "examples" / "train_3d.py"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_eight_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    launcher = Path(sys.executable).with_name("shardcore-launch")
    options = ["--steps", "30", "--seq", "32", "--out", tmp_path]
    result = subprocess.run(
        [launcher, "--nproc-per-node", "8", SCRIPT, *options], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    curves = {name: [float(loss) for loss in _losses(name, lines)] for name in ("3d", "alone")}
    assert len(curves["3d"]) == len(curves["alone"]) == 4
    assert curves["3d"][-1] < curves["3d"][0] - 1
    difference = re.fullmatch(r"largest difference (\S+)", lines[-1])
    assert difference is not None
    assert float(difference.group(1)) < 5e-3  # sums in another order, through thirty steps of Adam
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def _losses(name: str, lines: list[str]) -> list[str]:
    """The losses of a run's progress lines."""
    return [match.group(1) for line in lines if (match := re.match(rf" *{name}: step .* loss ([\d.]+)$", line))]
