"""Time from the start of the processes to the end of the first training step: shardcore against DeepSpeed, interleaved.

    python benches/e2e/startup.py

DeepSpeed compiles an operator the first time it runs on a machine; the first round, which is not counted, lets it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.e2e import arms
from benches.machine import Bystanders
from benches.processes import NUM_RANKS, THREADS_PER_RANK, free_port

STAGES = (2, 3)
AT_MOST = 0.5


def first_step_seconds(arm: str, model: str) -> float:
    """Start both ranks as fresh processes; the time until the later one has made its first step."""
    port = str(free_port())
    script = str(Path(__file__).with_name("first_step.py"))
    start = time.perf_counter()
    ranks = [
        subprocess.Popen(
            [sys.executable, script, arm, str(rank), str(NUM_RANKS), port, model],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    seconds = max(_seconds_until_done(arm, rank, start) for rank in ranks)
    for rank in ranks:
        rank.communicate()
    return seconds


def _seconds_until_done(arm: str, rank: subprocess.Popen[str], start: float) -> float:
    assert rank.stdout is not None
    for line in rank.stdout:
        if line.startswith("first step done"):
            return time.perf_counter() - start
    raise SystemExit(f"{arm} did not make its first step:\n{rank.communicate()[1]}")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--model", default="25m", help="preset of examples/gpt.py (default: 25m)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    candidates = [f"{library}-{stage}" for stage in STAGES for library in ("shardcore", "deepspeed")] + ["ddp"]
    names = [arm for arm in candidates if arms.is_available(arm)]
    times: dict[str, list[float]] = {name: [] for name in names}
    bystanders = Bystanders([])
    for index in range(args.rounds + 1):
        for name in names if index % 2 == 0 else reversed(names):
            seconds = first_step_seconds(name, args.model)
            if index:
                times[name].append(seconds)
        print(
            f"round {index}: {', '.join(f'{n} {v[-1]:.1f}' for n, v in times.items() if v) or 'warm-up'}",
            file=sys.stderr,
        )
    rows = [[name, report.summarize(values).text(2)] for name, values in times.items()]
    pairs = [(f"shardcore-{stage}", f"deepspeed-{stage}") for stage in STAGES]
    report.Result(
        recipe=f"startup-{args.model}",
        title="Seconds from process start to the end of the first training step",
        settings={"ranks": NUM_RANKS, "threads per rank": THREADS_PER_RANK, "backend": "gloo", "rounds": args.rounds},
        rounds=times,
        unit="s",
        table=report.table(["arm", "seconds: median (low - high)"], rows),
        reaches=[
            report.Reach(f"{a} / {b}", report.ratio(times[a], times[b]), AT_MOST)
            for a, b in pairs
            if {a, b} <= times.keys()
        ],
        bystanders=bystanders.share(),
    ).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
