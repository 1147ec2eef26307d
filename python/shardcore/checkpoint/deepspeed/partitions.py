"""Where ZeRO keeps which elements of a parameter: in flat partitions, one for each rank.

Stages 1 and 2 lay the parameters of a group one behind the other and cut that into equal partitions; each file says
which range of its partition belongs to which parameter. Stage 3 cuts every parameter into equal parts of its own,
rounded up, and lays the parts of a rank one behind the other, in subgroups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardcore.checkpoint.unpickling import Inert
from shardcore.errors import CheckpointError

Shapes = list[dict[str, Any]]
"""For each group, the shapes of its parameters by name, in their order."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """One parameter with its states."""

    group: int
    """Of the optimizer's parameter groups."""
    name: str
    shape: list[int]
    master: list[torch.Tensor]
    """1-D, of every rank."""
    states: dict[str, list[torch.Tensor]]
    """1-D, of every rank; what the optimizer keeps for each element."""
    values: dict[str, float]
    """What it keeps once."""


def partitioned(ranks: list[dict[str, Any]], shapes: Shapes, what: str) -> Iterator[Partitioned]:
    """The parameters of one pipeline stage.

    Args:
        ranks: the ``optimizer_state_dict`` of every data-parallel rank.

    Raises:
        CheckpointError: a form that is not known.
    """
    if "fp32_flat_groups" in ranks[0]:
        yield from _cut_by_parameter(ranks, shapes)
    elif "single_partition_of_fp32_groups" in ranks[0] and "param_slice_mappings" in ranks[0]:
        yield from _cut_by_group(ranks, shapes, what)
    else:
        raise CheckpointError(
            f"{what}: an optimizer's file has {sorted(ranks[0])}, which is no form of ZeRO's known here"
        )


def check_count(ranks: list[dict[str, Any]], what: str) -> None:
    """Raise unless there is a file of every rank.

    Raises:
        CheckpointError: there are fewer or more.
    """
    told = ranks[0].get("partition_count", len(ranks)) if ranks else 1
    count = max(told) if isinstance(told, list | tuple) else int(told)
    if count != len(ranks):
        raise CheckpointError(f"{what}: {count} ranks saved their optimizer's state, and {len(ranks)} files are there")


def param_groups(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of the optimizer's parameter groups."""
    base = _base(rank)
    return list(base["param_groups"]) if isinstance(base, dict) else []


def step_in(rank: dict[str, Any]) -> Any | None:
    """The number of steps, where it is kept with the state of any parameter, or once for all."""
    base = _base(rank)
    states = base.get("state", {}).values() if isinstance(base, dict) else ()
    return next((state["step"] for state in states if "step" in state), rank.get("base_optimizer_state_step"))


def _base(rank: dict[str, Any]) -> Any:
    return rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))


def _cut_by_group(ranks: list[dict[str, Any]], shapes: Shapes, what: str) -> Iterator[Partitioned]:
    if not all(isinstance(_base(rank), dict) for rank in ranks):
        raise CheckpointError(f"{what}: it was saved with elastic_checkpoint, which is not read")
    for group, named in enumerate(shapes):
        masters = [rank["single_partition_of_fp32_groups"][group] for rank in ranks]
        flat = [_Flat(master, _base(rank)["state"].get(group, {})) for master, rank in zip(masters, ranks, strict=True)]
        for name, shape in named.items():
            ranges = [_range_of(rank["param_slice_mappings"][group].get(name)) for rank in ranks]
            held = [(each, *place) for each, place in zip(flat, ranges, strict=True) if place[1] > place[0]]
            yield _gather(group, name, list(shape), held)


def _cut_by_parameter(ranks: list[dict[str, Any]], shapes: Shapes) -> Iterator[Partitioned]:
    group_of = [group for group, options in enumerate(param_groups(ranks[0])) for _ in options["params"]]
    for number, named in enumerate(shapes):
        flat = [_Flat(rank["fp32_flat_groups"][number], _base(rank)["state"].get(number, {})) for rank in ranks]
        offset = 0
        for name, shape in named.items():
            part_numel = -(-prod(shape) // len(ranks))
            held = [(each, offset, offset + part_numel) for each in flat]
            yield _gather(group_of[number] if number < len(group_of) else 0, name, list(shape), held)
            offset += part_numel


@dataclass(frozen=True, slots=True)
class _Flat:
    """One rank's partition, and the optimizer's state of it."""

    master: torch.Tensor
    state: dict[str, Any]

    def states(self) -> list[str]:
        return [name for name, value in self.state.items() if isinstance(value, torch.Tensor) and value.dim()]

    def values(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.state.items() if name not in self.states()}


def _gather(group: int, name: str, shape: list[int], held: list[tuple[_Flat, int, int]]) -> Partitioned:
    master = [flat.master.reshape(-1)[start:stop] for flat, start, stop in held]
    names = held[0][0].states() if held else []
    states = {state: [flat.state[state].reshape(-1)[start:stop] for flat, start, stop in held] for state in names}
    return Partitioned(group, name, shape, master, states, held[0][0].values() if held else {})


def _range_of(address: Any) -> tuple[int, int]:
    """The range that a fragment's address names; empty for a rank that holds nothing of the parameter."""
    if not isinstance(address, Inert):
        return (0, 0)
    start, numel = int(address.fields["start"]), int(address.fields["numel"])
    return (start, start + numel)
