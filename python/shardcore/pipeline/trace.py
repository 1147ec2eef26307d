"""When each action of a real run began and ended, as a trace that Perfetto shows: one track per rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardcore import comm
from shardcore.mesh import Axis

Span = tuple[str, int, int]
"""(the action as plans write it, start, end): nanoseconds of the wall clock as the host sees them."""


def save(path: str | Path, spans: Sequence[Span], axis: Axis) -> None:
    """Write the spans of all ranks of the axis to ``path``, on its first rank. Collective over the axis.

    On CUDA the host's times are those of the launches: what the device does comes later.
    """
    by_rank = comm.exchange(list(spans), axis, "trace")
    if axis.rank != 0:
        return
    began = min((start for each in by_rank for _, start, _ in each), default=0)
    events: list[dict[str, Any]] = []
    for rank, each in zip(axis.ranks, by_rank, strict=True):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": name,
                "ts": (start - began) / 1e3,
                "dur": (end - start) / 1e3,
            }
            for name, start, end in each
        ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
