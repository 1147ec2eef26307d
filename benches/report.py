"""Medians with their spread, ratios that are paired by round, tables, and the files that keep them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benches import machine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over all rounds."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (self.high - self.low) / self.median

    def text(self, digits: int = 1) -> str:
        """``median (lowest - highest)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} - {self.high:.{digits}f})"


def summarize(values: Sequence[float]) -> Summary:
    """The median, lowest and highest of one value per round."""
    return Summary(median(values), min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Ours over theirs, round by round, so that a slow spell of the machine, which hits both, cancels."""
    return summarize([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class Reach:
    """A ratio and the most it should be."""

    name: str
    ratio: Summary
    at_most: float

    @property
    def reached(self) -> bool:
        return self.ratio.median <= self.at_most

    def text(self) -> str:
        """One line for people."""
        verdict = "reached" if self.reached else "MISSED"
        return f"{self.name}: {self.ratio.text(3)}, wanted at most {self.at_most}: {verdict}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, slots=True)
class Result:
    """What one command measured."""

    recipe: str
    """Names the files: what was measured."""
    title: str
    settings: Mapping[str, Any]
    rounds: Mapping[str, Sequence[float]]
    """Per arm, one value for each round, in ``unit``."""
    unit: str
    table: str
    reaches: Sequence[Reach] = ()
    notes: Sequence[str] = ()
    bystanders: float | None = None
    """Part of the machine's CPU time that went to processes which were not being measured."""

    def text(self) -> str:
        """The result for people, in Markdown."""
        described = machine.describe()
        where = ", ".join(f"{key} {value}" for key, value in described.items())
        lines = [f"# {self.title}", "", f"Machine: {where}."]
        lines.append(f"Settings: {', '.join(f'{key} {value}' for key, value in self.settings.items())}.")
        if self.bystanders is not None:
            lines.append(f"Other processes took {self.bystanders:.0%} of the machine's CPU time meanwhile.")
        lines += ["", self.table, ""]
        lines += [f"- {reach.text()}" for reach in self.reaches]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def data(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            "recipe": self.recipe,
            "date": datetime.date.today().isoformat(),
            "machine": machine.describe(),
            "settings": dict(self.settings),
            "unit": self.unit,
            "rounds": {arm: list(values) for arm, values in self.rounds.items()},
            "reaches": [{**asdict(reach), "reached": reach.reached} for reach in self.reaches],
            "notes": list(self.notes),
            "bystanders": self.bystanders,
        }

    def finish(self, json_path: Path | None, *, save: bool) -> None:
        """Print the result; write it to ``json_path``, and with ``save`` to ``results/<recipe>-<hardware>-<month>``."""
        print(self.text())
        text = json.dumps(self.data(), indent=1) + "\n"
        if json_path is not None:
            json_path.write_text(text)
        if save:
            RESULTS.mkdir(exist_ok=True)
            stem = f"{self.recipe}-{machine.slug()}-{datetime.date.today():%Y-%m}"
            (RESULTS / f"{stem}.json").write_text(text)
            (RESULTS / f"{stem}.md").write_text(self.text())
            print(f"written: {RESULTS / stem}.json and .md")
