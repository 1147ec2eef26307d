"""Test harness: run a test on several ranks, count tensor memory, compare with an unsharded twin.

``spmd`` and ``run_spmd`` run a function on rank processes. ``tensor_bytes`` and ``PeakTensorBytes`` count live
storages. ``zoo`` has tiny models, ``twin`` the reference loop and comparisons.
"""

from __future__ import annotations

from shardcore.testing import twin, zoo
from shardcore.testing.decorator import run_spmd, spmd
from shardcore.testing.memory import PeakTensorBytes, tensor_bytes
from shardcore.testing.pool import SpmdSkip, shutdown
from shardcore.testing.report import RankReport, SpmdError

__all__ = [
    "PeakTensorBytes",
    "RankReport",
    "SpmdError",
    "SpmdSkip",
    "run_spmd",
    "shutdown",
    "spmd",
    "tensor_bytes",
    "twin",
    "zoo",
]
