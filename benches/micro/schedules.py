"""What plans of pipeline schedules take: made, lowered, simulated, checked under each communication, synthesised.

    python benches/micro/schedules.py

One thread, through the Python names. 64 ranks, 1,024 micro-batches and 2 stages a rank, where torch 2.13 takes 32.7 s
to make and lower one schedule; synthesis on 16 ranks with 64 micro-batches and uneven stages, so that no bound ends the
search early. Growth is time per forward from 16 ranks to ``--largest``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.machine import Bystanders

from shardcore import plan

NUM_RANKS, NUM_MICROBATCHES, NUM_CHUNKS = 64, 1024, 2
COSTS = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "hop": 0.05}
NAMES = ("interleaved", "interleaved-zb")
COMMS = ("buffered", "directed", "batched", "pair-fifo", "one-fifo", "blocking")
SIZES = ((16, 256), (64, 1024), (256, 2048), (1024, 4096))

BUILD_AND_LOWER, SIMULATE, SIMULATE_LOWERED = "build and lower", "simulate", "simulate lowered"
LIMITS = {BUILD_AND_LOWER: 50, SIMULATE: 50, SIMULATE_LOWERED: 50, "check": 100, "synthesize": 1000}
"""The most milliseconds of each kind of work."""

MOST_GROWTH = 4.0
"""How many times as long a forward may take in the largest plan as in the smallest: that one fits into the cache."""

Arm = Callable[[], object]


def arms_of(name: str) -> dict[str, Arm]:
    """What is measured on one schedule."""

    def build() -> plan.PipelineSchedule:
        return plan.pipeline_schedule(name, NUM_RANKS, NUM_MICROBATCHES, NUM_CHUNKS)

    schedule = build()
    lowered = schedule.lower()
    arms: dict[str, Arm] = {
        BUILD_AND_LOWER: lambda: build().lower(),
        SIMULATE: lambda: schedule.simulate(**COSTS),
        SIMULATE_LOWERED: lambda: lowered.simulate(**COSTS),
        "check capacity 1": lambda: lowered.check(capacity=1),
    }
    for comm in COMMS:
        arms[f"check {comm}"] = lambda comm=comm: lowered.check(comm=comm)  # type: ignore[misc]
    return {f"{name}: {what}": arm for what, arm in arms.items()}


def synthesis() -> object:
    """Uneven stages and a latency, in the memory of ZB-H1."""

    def uneven(mean: float) -> list[float]:
        return [mean * (0.8 + 0.1 * (stage * 7 % 5)) for stage in range(16)]

    return plan.synthesize(16, 64, uneven(1.0), uneven(1.1), uneven(0.8), hop=0.3, memory_cap=16)


def spent(arm: Arm) -> float:
    """Milliseconds of one call, without the end of what it made."""
    start = time.perf_counter()
    made = arm()
    end = time.perf_counter()
    del made
    return 1e3 * (end - start)


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """ms per call of each round; arms take turns, and the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        for name, arm in arms.items():
            ms = spent(arm)
            if index:
                times[name].append(ms)
    return times


def growth(largest: int, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per forward of all steps together: build, lower, simulate, check."""

    def whole(num_ranks: int, num_microbatches: int) -> None:
        schedule = plan.pipeline_schedule("interleaved", num_ranks, num_microbatches, NUM_CHUNKS)
        schedule.simulate(**COSTS)
        schedule.lower().check(comm="blocking")

    found: dict[str, list[float]] = {}
    for num_ranks, num_microbatches in SIZES:
        if num_ranks <= largest:
            forwards = num_ranks * num_microbatches * NUM_CHUNKS
            times = [
                spent(lambda sizes=(num_ranks, num_microbatches): whole(*sizes))  # type: ignore[misc]
                for _ in range(rounds)
            ]
            found[f"p={num_ranks} m={num_microbatches}"] = [1e6 * ms / forwards for ms in times]
    return found


def limit(name: str) -> float:
    """The most milliseconds that an arm should take."""
    return next(most for work, most in reversed(LIMITS.items()) if work in name)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--largest", type=int, default=1024, help="ranks of the largest plan (default: 1024; 4 GiB)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    bystanders = Bystanders([])
    times: dict[str, list[float]] = {}
    for name in NAMES:
        times |= measure(arms_of(name), args.rounds)
    times |= measure({"synthesize": synthesis}, args.rounds)
    grown = growth(args.largest, 3)
    share = bystanders.share()
    rows = [[arm, report.summarize(ms).text(1), f"{limit(arm)}"] for arm, ms in times.items()]
    reaches = [report.Reach(f"ms of {arm}", report.summarize(ms), limit(arm)) for arm, ms in times.items()]
    first, *_, last = grown.values()
    reaches.append(report.Reach("time per forward, largest over smallest", report.ratio(last, first), MOST_GROWTH))
    per_forward = [[size, report.summarize(values).text(0)] for size, values in grown.items()]
    tables = [
        report.table(["plan", "ms: median (low - high)", "at most"], rows),
        report.table(["build, lower, simulate and check", "ns per forward: median (low - high)"], per_forward),
    ]
    report.Result(
        recipe="schedules",
        title="Plans of pipeline schedules",
        settings={"ranks": NUM_RANKS, "micro-batches": NUM_MICROBATCHES, "chunks": NUM_CHUNKS, "rounds": args.rounds},
        rounds=times | {f"ns per forward, {size}": values for size, values in grown.items()},
        unit="ms",
        table="\n\n".join(tables),
        reaches=reaches,
        bystanders=share,
    ).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
