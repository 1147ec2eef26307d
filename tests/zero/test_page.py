"""The example of the page on state runs."""

from __future__ import annotations

import re
from pathlib import Path

from shardcore.testing import spmd

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


@spmd(world=2)
def test_the_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(PAGE), "exec"), {})
