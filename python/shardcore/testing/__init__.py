"""Test harness: run a test on several ranks, count tensor memory, compare with an unsharded twin.

``spmd`` and ``run_spmd`` run a function on rank processes. ``tensor_bytes`` and ``PeakTensorBytes`` count live
storages. ``zoo`` has tiny models, ``twin`` the reference loop and comparisons. ``schedules`` and its neighbours are
hypothesis strategies and assertions for pipeline schedules; they need hypothesis, and no torch.

Names are imported when first used, so that each needs only what it works with.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcore.testing import twin as twin
    from shardcore.testing import zoo as zoo
    from shardcore.testing.decorator import run_spmd as run_spmd
    from shardcore.testing.decorator import spmd as spmd
    from shardcore.testing.memory import PeakTensorBytes as PeakTensorBytes
    from shardcore.testing.memory import tensor_bytes as tensor_bytes
    from shardcore.testing.mutants import MUTANT_KINDS as MUTANT_KINDS
    from shardcore.testing.mutants import Mutant as Mutant
    from shardcore.testing.mutants import schedule_mutants as schedule_mutants
    from shardcore.testing.pipeline import PipelineShape as PipelineShape
    from shardcore.testing.pipeline import assert_schedule as assert_schedule
    from shardcore.testing.pipeline import pipeline_shapes as pipeline_shapes
    from shardcore.testing.pipeline import schedule_costs as schedule_costs
    from shardcore.testing.pipeline import schedule_lowerings as schedule_lowerings
    from shardcore.testing.pipeline import schedules as schedules
    from shardcore.testing.pool import SpmdSkip as SpmdSkip
    from shardcore.testing.pool import shutdown as shutdown
    from shardcore.testing.reference import reference_step as reference_step
    from shardcore.testing.report import RankReport as RankReport
    from shardcore.testing.report import SpmdError as SpmdError

_HOME = {
    "MUTANT_KINDS": "mutants",
    "Mutant": "mutants",
    "PeakTensorBytes": "memory",
    "PipelineShape": "pipeline",
    "RankReport": "report",
    "SpmdError": "report",
    "SpmdSkip": "pool",
    "assert_schedule": "pipeline",
    "pipeline_shapes": "pipeline",
    "reference_step": "reference",
    "run_spmd": "decorator",
    "schedule_costs": "pipeline",
    "schedule_lowerings": "pipeline",
    "schedule_mutants": "mutants",
    "schedules": "pipeline",
    "shutdown": "pool",
    "spmd": "decorator",
    "tensor_bytes": "memory",
}
"""The file of each name."""

_MODULES = ("twin", "zoo")

__all__ = [
    "MUTANT_KINDS",
    "Mutant",
    "PeakTensorBytes",
    "PipelineShape",
    "RankReport",
    "SpmdError",
    "SpmdSkip",
    "assert_schedule",
    "pipeline_shapes",
    "reference_step",
    "run_spmd",
    "schedule_costs",
    "schedule_lowerings",
    "schedule_mutants",
    "schedules",
    "shutdown",
    "spmd",
    "tensor_bytes",
    "twin",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"shardcore.testing.{name} needs hypothesis, which is not installed: pip install 'shardcore-torch[testing]'"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
