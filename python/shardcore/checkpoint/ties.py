"""Parameters that several pipeline stages hold: they are kept once, under one name with all the others."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from shardcore.checkpoint.crew import Crew
from shardcore.protocols import find_pipeline, find_slot


class Tie(NamedTuple):
    """One such parameter."""

    name: str
    """The one under which it is kept: the first stage's."""
    names: tuple[str, ...]
    """All that it has in any stage."""


def ties_of(model: nn.Module, crew: Crew) -> dict[str, Tie]:
    """The ties of this rank's stages, by the name that each has here. Collective over all ranks of the job."""
    pipeline = find_pipeline(model)
    if pipeline is None:
        return {}
    slots = {tie: find_slot(param) for tie, param in pipeline.tied_parameters().items()}
    mine = {tie: [slot.name, *slot.aliases] for tie, slot in slots.items() if slot is not None}
    told = crew.tell("parameters tied over stages", lambda: [crew.rank, mine])
    everywhere: dict[str, list[str]] = {}
    for _, names in told:
        for tie, known in names.items():
            everywhere.setdefault(tie, []).extend(known)
    found = {}
    for tie, names in mine.items():
        known = tuple(dict.fromkeys(everywhere[tie]))
        found[names[0]] = Tie(known[0], known)
    return found
