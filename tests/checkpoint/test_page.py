"""The example of the page on checkpoints runs."""

from __future__ import annotations

import re
from pathlib import Path

from shardcore.testing import spmd

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@spmd(world=2)
def test_the_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    place = 'f"{tempfile.gettempdir()}/checkpoints-example"'
    assert place in block
    exec(compile(block.replace(place, repr(str(tmp_path))), str(PAGE), "exec"), {})
