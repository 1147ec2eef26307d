"""What the page promises: its example runs, and a trace shows the program."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import shardcore as sc
from pipeline.models import Data
from pipeline.twin import Recipe, make
from shardcore import plan
from shardcore.testing import spmd

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


@spmd(world=2)
def test_the_pages_example_runs() -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    assert float(names["loss"]) < math.log(256) - 0.2  # type: ignore[arg-type]  # better than guessing


def record(path: str) -> None:
    """A traced step, behind an untraced one."""
    mesh = sc.Mesh(pp=2)
    pipe, optimizer = make(Recipe(schedule="zb-v", m=3), mesh)
    data = Data().of_rank(0, 1, 3, 2)
    pipe.train_batch(data, optimizer)
    with pipe.trace(path):
        pipe.train_batch(data, optimizer)


def test_a_trace_has_the_programs_actions(tmp_path: Path) -> None:
    sc.testing.run_spmd(record, 2, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    schedule = plan.pipeline_schedule("zb-v", 2, 3).lower(zero_stage=0, tied=[[0, 3]])
    for rank in range(2):
        spans = [e for e in events if e["tid"] == rank and e["ph"] == "X"]
        assert [span["name"] for span in spans] == [str(action) for action in schedule.program(rank)]
        assert all(span["dur"] >= 0 for span in spans)
        starts = [span["ts"] for span in spans]
        assert starts == sorted(starts)
