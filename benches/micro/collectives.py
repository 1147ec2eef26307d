"""Which way of moving shards between CPU ranks is fastest: those of gloo, and what ``shardcore.comm`` takes.

    python benches/micro/collectives.py

Two ranks, one thread each. Sizes are those of the whole buffer, of which each rank owns a half. The ways of reducing
leave the sum of a rank's own half in its place; the ways of gathering fill the other half.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.machine import Bystanders
from benches.processes import NUM_RANKS, THREADS_PER_RANK, Arm, Handler

REDUCES = ("reduce-scatter", "all-reduce", "all-to-all + sum", "shardcore reduce")
GATHERS = ("all-gather", "broadcasts", "shardcore gather")


def make_handler(name: str, settings: Any) -> Handler:
    """One rank; answers ``time``: (way, mebibytes, repeats) -> ms per call."""
    import torch

    import shardcore as sc

    torch.set_num_threads(THREADS_PER_RANK)
    axis = sc.Mesh(device="cpu")["dp"]

    def handle(command: str, argument: tuple[str, int, int]) -> float:
        way, mebibytes, repeats = argument
        return _time(_way(way, torch.ones(mebibytes << 18), axis), repeats)

    return handle


def _time(call: Callable[[], Any], repeats: int) -> float:
    import torch.distributed as dist

    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start) / repeats


def _way(name: str, full: Any, axis: Any) -> Callable[[], Any]:
    """One way to move ``full`` float32 [N]; the call returns when the data have come."""
    import torch
    import torch.distributed as dist

    from shardcore import comm

    halves = list(full.view(axis.size, -1).unbind(0))
    own, received = halves[axis.rank], torch.empty_like(full)
    parts = received.view(axis.size, -1)

    def exchange_and_sum() -> None:
        dist.all_to_all_single(received, full)
        torch.add(parts[0], parts[1], out=own)
        for part in parts[2:]:
            own.add_(part)

    def broadcast_each() -> None:
        for work in [dist.broadcast(half, source, async_op=True) for source, half in enumerate(halves)]:
            work.wait()

    ways: dict[str, Callable[[], Any]] = {
        "reduce-scatter": lambda: dist.reduce_scatter_single(own, full),
        "all-reduce": lambda: dist.all_reduce(full),
        "all-to-all + sum": exchange_and_sum,
        "shardcore reduce": lambda: comm.reduce_shards(full, axis, "bench").wait(),
        "all-gather": lambda: dist.all_gather_single(full, own),
        "broadcasts": broadcast_each,
        "shardcore gather": lambda: comm.gather_shards(full, axis, "bench").wait(),
    }
    return ways[name]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 8, 64], help="buffer sizes (default: 1 8 64)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    ranks = Arm("collectives", make_handler, None)
    bystanders = Bystanders(ranks.pids)
    times: dict[str, list[float]] = {}
    for index in range(args.rounds + 1):
        for mebibytes in args.mebibytes:
            for way in (*REDUCES, *GATHERS):
                value = max(ranks.ask("time", (way, mebibytes, max(3, 64 // mebibytes))))
                if index:
                    times.setdefault(f"{way}, {mebibytes} MiB", []).append(value)
    share = bystanders.share()
    ranks.close()
    rows = [
        [way, *(report.summarize(times[f"{way}, {mebibytes} MiB"]).text(2) for mebibytes in args.mebibytes)]
        for way in (*REDUCES, *GATHERS)
    ]
    report.Result(
        recipe="collectives",
        title="Milliseconds to reduce or gather a buffer in shards over gloo",
        settings={"ranks": NUM_RANKS, "threads per rank": THREADS_PER_RANK, "dtype": "fp32", "rounds": args.rounds},
        rounds=times,
        unit="ms per call",
        table=report.table(["way", *(f"{mebibytes} MiB" for mebibytes in args.mebibytes)], rows),
        bystanders=share,
    ).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
