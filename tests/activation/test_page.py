"""The example of the page on activation checkpointing runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import shardcore as sc

PAGE = Path(__file__).parents[2] / "docs" / "activation.md"


def test_the_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    assert sc.activation.is_wrapped(names["model"])
