"""What a training is besides tensors: options, counters, schedule, random numbers, position in the data."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardcore.checkpoint.crew import Crew
from shardcore.checkpoint.holding import Holding
from shardcore.checkpoint.values import encode, to_json
from shardcore.protocols import ShardedOptimizerMark, ShardedRoot, find_pipeline, find_slot

CLIENT = "client_state"


class Stateful(Protocol):
    """A scheduler, a sampler, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


def gather_parts(
    scheduler: Stateful | None, data: Stateful | None, parts: Mapping[str, Stateful] | None
) -> dict[str, Stateful]:
    """What has a state of its own, by name."""
    named = {"scheduler": scheduler, "data": data, **(parts or {})}
    return {name: part for name, part in named.items() if part is not None}


def describe(
    model: nn.Module,
    root: ShardedRoot,
    optimizer: ShardedOptimizerMark | None,
    parts: Mapping[str, Stateful],
    client_state: Any,
) -> dict[str, Any]:
    """All of it, encoded; what ranks know of different parameters is not merged yet. Not collective.

    Raises:
        CheckpointError: something is no plain value; the message names it.
    """
    pipeline = find_pipeline(model)
    return {
        "model": type(model).__name__,
        "torch": torch.__version__,
        "stage": getattr(getattr(root, "policy", None), "stage", None),
        "mesh": _mesh_of(root),
        "optimizer": None if optimizer is None else _describe_optimizer(optimizer),
        "pipeline": None if pipeline is None else {"num_steps": pipeline.num_steps},
        "parts": {name: encode(part.state_dict(), f"the state of {name}") for name, part in parts.items()},
        CLIENT: encode(client_state, CLIENT),
    }


def merge(crew: Crew, holding: Holding, mine: dict[str, Any]) -> dict[str, Any]:
    """The first rank's description with every rank's parameters. Collective."""
    groups = [group["params"] for group in mine["optimizer"]["groups"]] if mine["optimizer"] else []
    mine_only = [holding.weights, holding.buffers, _grouped(holding.values), groups]
    told = crew.tell("parameters of all ranks", lambda: mine_only)
    merged = {**mine, "world": crew.axis.size, "weights": {}, "buffers": {}}
    values: dict[str, Any] = {}
    for weights, buffers, known, _ in told:
        merged["weights"].update(weights)
        merged["buffers"].update(buffers)
        for content, names in known:
            values.update(dict.fromkeys(names, content))
    if merged["optimizer"]:
        merged["optimizer"]["values"] = _grouped(values)
        for i, group in enumerate(merged["optimizer"]["groups"]):
            group["params"] = list(dict.fromkeys(name for *_, lists in told for name in lists[i]))
    return merged


def values_by_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    """From a description, the encoded values of each parameter's state."""
    return {name: content for content, names in optimizer["values"] for name in names}


def names_in(params: Sequence[torch.Tensor]) -> list[str]:
    """The parameters' names in the unsharded model."""
    return [slot.name for slot in map(find_slot, params) if slot is not None]


def random_state(device: torch.device) -> torch.Tensor:
    """This rank's random number generators, as bytes."""
    state: dict[str, Any] = {"torch": _to_text(torch.get_rng_state()), "python": encode(random.getstate(), "random")}
    if device.type == "cuda":
        state["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return torch.tensor(list(to_json(state).encode()), dtype=torch.uint8)


def restore_random_state(state: dict[str, Any], decoded_python: Any, device: torch.device) -> None:
    """Set this rank's generators."""
    torch.set_rng_state(_from_text(state["torch"]))
    random.setstate(decoded_python)
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _describe_optimizer(optimizer: ShardedOptimizerMark) -> dict[str, Any]:
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        encoded = {key: encode(value, f"option {key} of parameter group {i}") for key, value in options.items()}
        groups.append({"options": encoded, "params": names_in(group["params"])})
    scale = optimizer.loss_scale
    return {
        "class": type(getattr(optimizer, "inner", optimizer)).__name__,
        "groups": groups,
        "num_steps": optimizer.num_steps,
        "num_skipped_steps": optimizer.num_skipped_steps,
        "loss_scale": {"kind": type(scale).__name__, "state": encode(scale.state_dict(), "the loss scale")},
    }


def _mesh_of(root: ShardedRoot) -> dict[str, int]:
    mesh = root.data_axis.mesh
    if mesh is None:
        return {root.data_axis.name: root.data_axis.size}
    return {name: mesh[name].size for name in ("pp", "replicate", "shard", "cp", "tp")}


def _grouped(values: dict[str, Any]) -> list[list[Any]]:
    """Equal contents once, with the names that have them."""
    found: dict[str, list[Any]] = {}
    for name, content in values.items():
        found.setdefault(to_json(content), [content, []])[1].append(name)
    return list(found.values())


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
