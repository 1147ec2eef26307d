"""The micro-batches of a step: drawn before it starts, and agreed on by all ranks, so that nobody waits for data that
will not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Mesh
from shardcore.pipeline.specs import Arguments

Batch = tuple[Any, Any]


def draw(data: Iterator[Any] | None, num_microbatches: int, where: str) -> list[Batch]:
    """Up to ``num_microbatches`` pairs (inputs, labels); fewer where the iterator ends. A dict with "labels" is one.

    Raises:
        ConfigError: no iterator on a rank that needs one, or it yields something else than pairs.
    """
    if data is None:
        raise ConfigError(
            f"{where} runs a first or last stage and needs an iterator of (inputs, labels); only ranks between may "
            "pass None"
        )
    if not hasattr(data, "__next__"):
        raise ConfigError(
            f"{where}: expected an iterator of (inputs, labels), got {type(data).__name__}; pass iter(loader), the "
            "same one at each step"
        )
    batches = []
    for batch in data:
        if isinstance(batch, Mapping) and "labels" in batch:
            batch = ({key: item for key, item in batch.items() if key != "labels"}, batch["labels"])
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise ConfigError(
                f"{where}: expected (inputs, labels), or a dict with 'labels', per "
                f"micro-batch, got {type(batch).__name__}"
            )
        batches.append((batch[0], batch[1]))
        if len(batches) == num_microbatches:
            break
    return batches


def agree(mesh: Mesh, what: str, num_drawn: int, num_microbatches: int, weights: list[float]) -> torch.Tensor | None:
    """All ranks learn whether all have their data, and the sum of ``weights`` over the data-parallel ranks.

    Collective over the whole mesh; ranks that call for something else than ``what`` are told so.

    Returns:
        [num_microbatches] float64, the sums; None if no rank gave any.

    Raises:
        StateError: on every rank, if an iterator ended early on any.
    """
    table = torch.zeros(num_microbatches + 1, dtype=torch.float64)
    table[0] = -num_drawn
    table[1 : len(weights) + 1] = torch.tensor(weights, dtype=torch.float64)
    comm.max_over_ranks(table, mesh["pp"], what)
    least = table[:1].clone()
    comm.max_over_ranks(least, mesh["dp"], what)
    if -least < num_microbatches:
        raise StateError(
            f"{what}: data exhausted after {int(-least)} of {num_microbatches} micro-batches; no micro-batch was used. "
            "End the epoch where the loader ends, or draw from one that repeats"
        )
    sums = comm.sum_over_ranks(table[1:], mesh["dp"], what)
    return sums if sums.any() else None


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with the tensors in its tuples, lists and dicts on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Arguments):
        return Arguments(to_device(value.args, device), to_device(value.kwargs, device))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    if type(value) is dict:
        return {key: to_device(item, device) for key, item in value.items()}
    return value
