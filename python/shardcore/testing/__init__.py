"""Test harness: run a test on several ranks, count tensor memory, compare with an unsharded twin.

``spmd`` and ``run_spmd`` run a function on rank processes. ``tensor_bytes`` and ``PeakTensorBytes`` count live
storages. ``zoo`` has tiny models, ``twin`` the reference loop and comparisons. ``schedules`` and its neighbours are
hypothesis strategies and assertions for pipeline schedules; they need hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardcore.testing import twin, zoo
from shardcore.testing.decorator import run_spmd, spmd
from shardcore.testing.memory import PeakTensorBytes, tensor_bytes
from shardcore.testing.pool import SpmdSkip, shutdown
from shardcore.testing.reference import reference_step
from shardcore.testing.report import RankReport, SpmdError

if TYPE_CHECKING:
    from shardcore.testing.mutants import MUTANT_KINDS as MUTANT_KINDS
    from shardcore.testing.mutants import Mutant as Mutant
    from shardcore.testing.mutants import schedule_mutants as schedule_mutants
    from shardcore.testing.pipeline import PipelineShape as PipelineShape
    from shardcore.testing.pipeline import assert_schedule as assert_schedule
    from shardcore.testing.pipeline import pipeline_shapes as pipeline_shapes
    from shardcore.testing.pipeline import schedule_costs as schedule_costs
    from shardcore.testing.pipeline import schedules as schedules

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
    "schedule_mutants",
    "schedules",
    "shutdown",
    "spmd",
    "tensor_bytes",
    "twin",
    "zoo",
]

_WITH_HYPOTHESIS = {
    "MUTANT_KINDS": "mutants",
    "Mutant": "mutants",
    "PipelineShape": "pipeline",
    "assert_schedule": "pipeline",
    "pipeline_shapes": "pipeline",
    "schedule_costs": "pipeline",
    "schedule_mutants": "mutants",
    "schedules": "pipeline",
}
"""Names whose file imports hypothesis, which the rest of this room does not need."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_HYPOTHESIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_WITH_HYPOTHESIS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"shardcore.testing.{name} needs hypothesis, which is not installed: pip install 'shardcore-torch[testing]'"
        ) from error
