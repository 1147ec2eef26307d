"""The example of the page on tensor parallelism runs, and says what it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardcore.testing import spmd

PAGE = Path(__file__).parents[2] / "docs" / "tensor.md"


@spmd(world=4)
def test_the_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    assert "blocks.*.up" in names["sc"].tensor.report(names["model"])
    if names["mesh"].rank == 0:
        assert names["state"]["token.weight"].shape == (256, 64)
    assert names["model"].token.weight.shape == (128, 64)
