"""Shared by all tests."""

from __future__ import annotations

import sys


def pytest_sessionfinish() -> None:
    """End the rank processes before pytest takes its streams down."""
    testing = sys.modules.get("shardcore.testing")
    if testing is not None:
        testing.shutdown()
