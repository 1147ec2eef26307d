"""The examples of docs/building.md run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from house import sources
from shardcore.testing import run_spmd
from zero.built import hugging_face


def check_examples(folder: str) -> None:
    text = (sources.REPO / "docs" / "building.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    before, sys.argv = sys.argv, ["load.py", folder]
    try:
        for example in examples:
            exec(example, {})
    finally:
        sys.argv = before


def test_the_examples_run(tmp_path: Path) -> None:
    hugging_face("llama")().save_pretrained(tmp_path)
    run_spmd(check_examples, 2, str(tmp_path))
