"""Importing is cheap: no torch where none is needed, no thread, no process group."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from house import sources

WITHOUT_TORCH = ["shardcore", "shardcore.errors", "shardcore.plan", "shardcore.config"]
COMMANDS_WITHOUT_TORCH = [["shardcore.launch", "--help"]]

BLOCK_TORCH = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"


def run(code: str, *arguments: str) -> str:
    """Standard output of a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_works_without_torch(module: str) -> None:
    run(BLOCK_TORCH + f"import {module}")


@pytest.mark.parametrize("command", COMMANDS_WITHOUT_TORCH, ids=" ".join)
def test_a_command_helps_without_torch(command: list[str]) -> None:
    code = BLOCK_TORCH + (
        "import importlib\n"
        "sys.argv[0] = 'command'\n"
        "try: code = importlib.import_module(sys.argv.pop(1)).main()\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(code)"
    )
    assert "usage" in run(code, *command).lower()


def test_every_public_name_of_the_package_is_there() -> None:
    code = "import shardcore as sc, json; print(json.dumps([n for n in sc.__all__ if not hasattr(sc, n)]))"
    assert json.loads(run(code)) == []


def test_no_module_starts_a_thread_or_joins_a_group() -> None:
    modules = sorted(
        ".".join(path.relative_to(sources.REPO / "python").with_suffix("").parts).removesuffix(".__init__")
        for path in sources.files(".py", "python")
        if path.name != "__main__.py"
    )
    code = """
import importlib, json, os, sys, threading
def num_threads():
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()
import numpy, torch, torch.distributed, pytest
before = num_threads()
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
print(num_threads() - before, torch.distributed.is_initialized())
"""
    assert run(code, json.dumps(modules)).split() == ["0", "False"]
