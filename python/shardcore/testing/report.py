"""What a rank reports about its part of a run, and the error that a failed run raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank did in a run."""

    rank: int
    """Global rank."""
    kind: Literal["ok", "skip", "error", "died", "hung"]
    """``ok`` returned, ``skip`` called ``pytest.skip``, ``error`` raised, ``died`` ended its process, ``hung`` was
    still running at the time limit."""
    at: float
    """Moment on the machine-wide monotonic clock, in seconds: comparable between ranks."""
    value: bytes = b""
    """Pickled result of an ``ok`` call."""
    error_type: str = ""
    """Class name of the exception of an ``error``."""
    message: str = ""
    """Text of the exception, reason of the skip, how the process ended, or which limit passed."""
    trace: str = ""
    """Traceback of an ``error``; stacks of all threads of a rank that ``hung``, or ``died`` of a crash."""
    output: str = ""
    """What the rank printed."""

    @property
    def failed(self) -> bool:
        """Whether this rank makes the run fail."""
        return self.kind in ("error", "died", "hung")

    def headline(self) -> str:
        """One line: rank and what happened to it."""
        match self.kind:
            case "ok":
                what = "returned"
            case "skip":
                what = f"skipped: {self.message}"
            case "error":
                first_line = self.message.strip().partition("\n")[0]
                what = f"raised {self.error_type}: {first_line}"
            case "died":
                what = f"died: {self.message}"
            case "hung":
                what = f"was still running {self.message}"
        return f"rank {self.rank} {what}"


class SpmdError(RuntimeError):
    """A run on rank processes failed. ``reports`` has every rank's part, ``first`` is the rank where it began."""

    def __init__(self, name: str, reports: list[RankReport]) -> None:
        self.reports = reports
        self.first = _first(reports)
        super().__init__(_text(name, reports, self.first))


def _first(reports: list[RankReport]) -> RankReport:
    """Where the failure began: a rank that died (its peers raise after it), else the first that raised, else hung."""
    order = {"died": 0, "error": 1, "hung": 2}
    return min((r for r in reports if r.failed), key=lambda r: (order[r.kind], r.at))


def _text(name: str, reports: list[RankReport], first: RankReport) -> str:
    world = len(reports)
    began = "no rank raised" if first.kind == "hung" else f"first: rank {first.rank}"
    lines = [f"{name} failed on {world} rank{'s' * (world > 1)} ({began})"]
    lines += [f"  {report.headline()}" for report in reports]
    for report in [first, *(r for r in reports if r is not first)]:
        if report.trace:
            what = "traceback" if report.kind == "error" else "stacks"
            lines += ["", f"----- rank {report.rank}: {what} -----", report.trace.rstrip()]
        if report.output:
            lines += ["", f"----- rank {report.rank}: output -----", report.output.rstrip()]
    return "\n".join(lines)
