"""What a load did, and what it did not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True, slots=True)
class Report:
    """Filled by a load; everything in it is worth knowing where it is not empty."""

    path: Path
    """The checkpoint that was loaded."""
    world: int = 0
    """Ranks that saved it."""
    missing: list[str] = field(default_factory=list)
    """Parameters and buffers of the model that it does not have; they are as before."""
    unexpected: list[str] = field(default_factory=list)
    """Parameters and buffers that only it has."""
    without_state: list[str] = field(default_factory=list)
    """Trained parameters of whose optimizer state it has nothing; they begin anew."""
    groups_kept: list[int] = field(default_factory=list)
    """Parameter groups that match none of its groups by their parameters, and keep their options."""
    notes: list[str] = field(default_factory=list)
    """Other checkpoints that were skipped, and what could not be taken over."""

    def explain(self) -> str:
        """All of it as text, one line each."""
        lists = {
            "missing in the checkpoint": self.missing,
            "only in the checkpoint": self.unexpected,
            "without optimizer state": self.without_state,
            "parameter groups that kept their options": [str(group) for group in self.groups_kept],
        }
        lines = [f"loaded {self.path} (saved by {self.world} ranks)"]
        lines += [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]
        return "\n".join([*lines, *self.notes])


class Loaded(dict[str, Any]):
    """The client state of a checkpoint, and in :attr:`report` what the load did."""

    def __init__(self, client_state: dict[str, Any], report: Report) -> None:
        super().__init__(client_state)
        self.report = report
