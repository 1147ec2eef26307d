"""The examples of the page on state run, one after another."""

from __future__ import annotations

import re
from pathlib import Path

from shardcore.testing import spmd

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


@spmd(world=2)
def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
