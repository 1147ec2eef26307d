"""Shared by all tests."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SAMPLED = ("activation", "checkpoint", "compose", "engine", "offload", "pipeline", "tensor", "zero")
"""Rooms whose tests start several ranks for each cell of their tables."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a table's cells the default run takes a half, of long tables a third, the same at every run; ``full`` all."""
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        room = item.path.relative_to(Path(__file__).parent).parts[0]
        if room in SAMPLED and hasattr(item, "callspec") and item.get_closest_marker("full") is None:
            tables[item.nodeid.split("[")[0]].append(item)
    for name, cells in tables.items():
        num_left_out = len(cells) // 2 if len(cells) < 6 else 2 * len(cells) // 3
        for item in random.Random(name).sample(cells, num_left_out):
            item.add_marker(pytest.mark.full)


def pytest_sessionfinish() -> None:
    """End the rank processes before pytest takes its streams down."""
    pool = sys.modules.get("shardcore.testing.pool")  # there only if a test started ranks
    if pool is not None:
        pool.shutdown()
