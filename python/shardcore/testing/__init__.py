"""Test harness: run a test on several ranks, count tensor memory, compare with an unsharded twin."""

from __future__ import annotations

from shardcore.testing.decorator import run_spmd, spmd
from shardcore.testing.pool import SpmdSkip, shutdown
from shardcore.testing.report import RankReport, SpmdError

__all__ = ["RankReport", "SpmdError", "SpmdSkip", "run_spmd", "shutdown", "spmd"]
