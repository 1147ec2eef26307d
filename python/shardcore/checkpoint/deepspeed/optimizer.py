"""The optimizer of a DeepSpeed run, as a checkpoint describes one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardcore.checkpoint.unpickling import Inert
from shardcore.checkpoint.values import encode, to_json
from shardcore.errors import CheckpointError

_OPTIONS = frozenset(
    {
        "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "dampening", "nesterov",
        "lr_decay", "alpha", "centered",
    }
)  # fmt: skip
"""What an option of a parameter group may be; others say how DeepSpeed's own classes compute."""


@dataclass(slots=True)
class Optimizer:
    """Its parameter groups and what it keeps once for each parameter."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """Options as they were saved."""
    names: dict[int, list[str]] = field(default_factory=dict)
    """Parameters of each group."""
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    """By parameter; those without state are not there."""
    scaler: Any = None

    def take(self, groups: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """Options and loss scale, of the first file that has them."""
        self.groups = self.groups or groups
        self.scaler = self.scaler or state.get("loss_scaler")

    def enter(self, group: int, name: str, values: dict[str, float], has_state: bool) -> None:
        """A parameter of a group."""
        self.names.setdefault(group, []).append(name)
        if values or has_state:
            step = self.groups[group].get("step") if group < len(self.groups) else None  # FusedAdam counts by group
            self.values[name] = values or ({} if step is None else {"step": float(step)})

    def describe(self, name: str, model: dict[str, Any]) -> dict[str, Any] | None:
        """As in an index; None where nothing is known of one.

        Args:
            name: of its class.
            model: a model's file, for its counters.
        """
        if not self.names:
            return None
        skipped = int(model.get("skipped_steps") or 0)
        options = self.groups or [{}] * (max(self.names) + 1)
        return {
            "class": name,
            "groups": [
                {"options": _options(group, i), "params": self.names.get(i, [])} for i, group in enumerate(options)
            ],
            "num_steps": int(model.get("global_steps") or 0) - skipped,
            "num_skipped_steps": skipped,
            "loss_scale": _loss_scale(self.scaler),
            "values": _grouped(self.values),
        }


def _options(group: dict[str, Any], number: int) -> dict[str, Any]:
    known = {key: value for key, value in group.items() if key in _OPTIONS}
    return {key: encode(value, f"option {key} of parameter group {number}") for key, value in known.items()}


def _grouped(values: dict[str, dict[str, float]]) -> list[list[Any]]:
    """Equal values once, with the names that have them."""
    found: dict[str, list[Any]] = {}
    for name, each in values.items():
        content = {key: encode(torch.tensor(value), key) for key, value in each.items()}
        found.setdefault(to_json(content), [content, []])[1].append(name)
    return list(found.values())


def _loss_scale(scaler: Any) -> dict[str, Any]:
    """Its factor, and of a dynamic one the steps since it last changed."""
    fields = scaler.fields if isinstance(scaler, Inert) else {}
    scale = float(fields.get("cur_scale", 1.0))
    if not fields.get("dynamic"):
        return {"kind": "ConstantScale", "state": {"scale": scale}}
    window = int(fields["scale_window"])
    if window < 1:
        raise CheckpointError(f"the loss scaler has a window of {window} steps")
    clean = (int(fields["cur_iter"]) - int(fields["last_overflow_iter"]) - 1) % window
    state = {"scale": scale, "tolerance": int(fields["cur_hysteresis"]), "clean_steps": clean}
    return {"kind": "DynamicScale", "state": state}
