"""Which tensor of a checkpoint belongs to which of the model: by name, whatever other names a tied one has."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from shardcore.checkpoint.holding import BUFFER, WEIGHT, Key, persistent_buffers, unsharded_parameters
from shardcore.checkpoint.stored import Stored
from shardcore.protocols import ShardedRoot, whole_shape


@dataclass(slots=True)
class Match:
    """What was found for this rank's part of the model."""

    weights: dict[str, str] = field(default_factory=dict)
    """From the name of a sharded parameter to the one it is kept under."""
    others: dict[Key, torch.Tensor] = field(default_factory=dict)
    """What every rank has whole, by its key in the checkpoint: buffers, and parameters that sharding left out."""
    missing: list[str] = field(default_factory=list)
    """In the model only."""
    used: set[str] = field(default_factory=set)
    """Names in the checkpoint that were found."""
    problems: list[str] = field(default_factory=list)
    """Shapes that differ."""


def match(model: nn.Module, root: ShardedRoot, stored: Stored) -> Match:
    """Look for every parameter and persistent buffer of the model. Not collective."""
    found = Match()
    for group in root.groups:
        for slot in group.slots:
            names = (slot.name, *slot.aliases)
            name = stored.name_among(names)
            found.used.update(kept for kept in (stored.name_among([other]) for other in names) if kept is not None)
            if name in stored.excluded and not group.trainable:
                continue
            if _check(found, stored, slot.name, name, list(whole_shape(slot.param))) and name is not None:
                found.weights[slot.name] = name
    for name, param in unsharded_parameters(model):
        kept = stored.name_among([name])
        if _check(found, stored, name, kept, list(param.shape)) and kept is not None:
            found.others[WEIGHT, kept] = param
    for name, (buffer, aliases) in persistent_buffers(model).items():
        role, kept = stored.buffer_among((name, *aliases)) or (BUFFER, None)
        if _check(found, stored, name, kept, list(buffer.shape), role=role) and kept is not None:
            found.others[role, kept] = buffer
    return found


def _check(found: Match, stored: Stored, name: str, kept: str | None, shape: list[int], role: str = WEIGHT) -> bool:
    """Whether the checkpoint has it in this shape."""
    if kept is None or (role, kept) not in stored.tensors:
        found.missing.append(name)
        return False
    found.used.add(kept)
    there = stored.shape((role, kept))
    if there != shape:
        found.problems.append(f"{name} has shape {shape} in the model and {there} in the checkpoint")
    return there == shape
