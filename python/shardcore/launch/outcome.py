"""How the ranks ended, read from their keepers' reports, and the words for it."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from shardcore.launch.plan import LaunchPlan, RankPlace

_SHOWN_LINES = 41
_CULPRIT = re.compile(r"RankFailedError: rank (\d+) failed: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank ended."""

    place: RankPlace
    """Which rank, where."""
    pid: int
    """Its process."""
    code: int
    """Exit code; negative: the number of the signal that ended it."""
    stopped: bool
    """Whether it was told to stop, and did not end by itself."""
    ended: float
    """When, in seconds on its machine's monotonic clock."""
    peak_nbytes: int
    """Its largest resident memory, 0 if unknown."""
    stderr: str
    """The end of what it wrote to standard error."""


def read_reports(plan: LaunchPlan, folder: Path) -> list[RankEnd]:
    """Reports of all ranks that have left one in the folder."""
    found = []
    for place in plan.places():
        path = folder / f"rank{place.rank}.json"
        if path.is_file():
            found.append(RankEnd(place=place, **json.loads(path.read_text())))
    return found


def first_failure(ends: list[RankEnd]) -> RankEnd | None:
    """The rank that failed by itself before all others did, or the one of which it says that it failed; or ``None``.
    Who only waited for a rank that raised often ends sooner.
    """
    failed = [end for end in ends if end.code != 0 and not end.stopped]
    first = min(failed, key=lambda end: end.ended, default=None)
    told = _CULPRIT.findall(first.stderr) if first is not None else []
    named = [end for end in ends if told and end.place.rank == int(told[-1]) and end.code != 0]
    return named[0] if named else first


def exit_status(end: RankEnd) -> int:
    """What a shell makes of it: ``128 + n`` for signal ``n``; 1 where the rank had failed when it was stopped."""
    if end.stopped:
        return 1
    return 128 - end.code if end.code < 0 else end.code


def last_words(end: RankEnd) -> list[str]:
    """What the rank wrote last to standard error, from its last traceback on, and what its signal may mean."""
    text = re.sub(r"^\[rank\d+\]: ?", "", end.stderr.rstrip(), flags=re.MULTILINE)
    start = text.rfind("Traceback (most recent call last)")
    lines = text[max(start, 0) :].splitlines()
    if start >= 0 and len(lines) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        lines = [*lines[:half], "...", *lines[-half:]]
    found = [f"  | {line}" for line in lines[-_SHOWN_LINES:]]
    return found + (_out_of_memory(end) if end.code == -signal.SIGKILL else [])


def describe(end: RankEnd) -> str:
    """Which rank ended, where, and how: one line."""
    place = end.place
    who = f"rank {place.rank} (local rank {place.local_rank}, process {end.pid}) on {place.host}"
    if end.stopped:
        return f"{who} failed"
    if end.code < 0:
        return f"{who} was ended by signal {-end.code} ({signal.Signals(-end.code).name})"
    return f"{who} failed with exit code {end.code}"


def _out_of_memory(end: RankEnd) -> list[str]:
    used = f"; it had used up to {end.peak_nbytes / 2**30:.1f} GiB" if end.peak_nbytes else ""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"  Unless someone sent that signal, the system ran out of memory{used}, and the machine has {total:.1f} GiB.",
        "  Check the kernel's log; use fewer ranks, a smaller micro-batch, a higher ZeRO stage.",
    ]
