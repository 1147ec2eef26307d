"""The examples of the pages on tensor, expert and context parallelism run, and say what they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardcore.testing import spmd

DOCS = Path(__file__).parents[2] / "docs"


def run(page: str) -> dict[str, Any]:
    """The names that a page's one example has left."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[0], page, "exec"), names)
    return names


@spmd(world=4)
def test_tensor_parallelism() -> None:
    names = run("tensor.md")
    assert "blocks.*.up" in names["sc"].tensor.report(names["model"])
    if names["mesh"].rank == 0:
        assert names["state"]["token.weight"].shape == (256, 64)
    assert names["model"].token.weight.shape == (128, 64)


@spmd(world=4)
def test_experts() -> None:
    names = run("experts.md")
    if names["mesh"].rank == 0:
        assert names["state"]["1.mixture.experts.down_proj"].shape == (8, 64, 256)
    assert names["model"][1].mixture.experts.down_proj.shape == (4, 64, 256)


@spmd(world=4)
def test_context_parallelism() -> None:
    names = run("context.md")
    assert names["inputs"].shape == (4, 64)
    assert float(names["loss"].detach()) < 6
