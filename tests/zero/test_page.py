"""The examples of the pages on state and on prefetching run, and print what the page says."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from shardcore import Mesh
from shardcore.testing import spmd

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "state.md"


@spmd(world=2)
def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})


@spmd(world=2)
def test_the_example_of_prefetching_prints_what_the_page_shows() -> None:
    text = (DOCS / "prefetch.md").read_text()
    ((example, shown),) = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", text, re.DOTALL)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(example, "docs/prefetch.md", "exec"), {})
    assert printed.getvalue() == (shown if Mesh().rank == 0 else "")
