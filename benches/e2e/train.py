"""Time per training step: shardcore, torch DDP, FSDP2 and DeepSpeed train the same GPT, interleaved in one run.

    python benches/e2e/train.py --rounds 7 --json out.json

Every arm has its own rank processes (CPU, gloo, one thread a rank), which sleep while another arm is measured. In each
round every arm makes a few steps in turn; odd rounds go through the arms backwards.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.e2e import arms
from benches.e2e.trainer import Settings, make_handler
from benches.machine import Bystanders
from benches.processes import NUM_RANKS, THREADS_PER_RANK, Arm

REACHES = [
    ("shardcore-1", "ddp", 0.95),
    ("shardcore-2", "ddp", 0.95),
    ("shardcore-3", "fsdp2", 0.72),
    ("shardcore-3", "deepspeed-3", 0.60),
]


def main() -> None:
    """Measure and report."""
    args = parse_arguments()
    names = [arm for arm in args.arms if arms.is_available(arm)]
    missing = [arm for arm in args.arms if arm not in names]
    settings = Settings(model=args.model, batch=args.batch, seq=args.seq)
    running = {}
    for name in names:
        print(f"starting {name}", file=sys.stderr, flush=True)
        running[name] = Arm(name, make_handler, settings)
    bystanders = Bystanders([pid for arm in running.values() for pid in arm.pids])
    times, losses, num_params = measure(running, args.rounds, args.steps)
    share = bystanders.share()
    for arm in running.values():
        arm.close()
    reaches = [
        report.Reach(f"{a} / {b}", report.ratio(times[a], times[b]), most)
        for a, b, most in REACHES
        if {a, b} <= times.keys()
    ]
    report.Result(
        recipe=f"train-{args.model}",
        title=f"Milliseconds per training step, {num_params / 1e6:.1f}M-parameter GPT",
        settings={
            "ranks": NUM_RANKS,
            "threads per rank": THREADS_PER_RANK,
            "backend": "gloo; shardcore's ranks read each other's memory",
            "dtype": "fp32",
            "optimizer": "fused AdamW",
            "tokens per rank and step": f"{args.batch} x {args.seq}",
            "rounds": args.rounds,
            "steps per round": args.steps,
        },
        rounds=times,
        unit="ms per step",
        table=make_table(times, losses),
        reaches=reaches,
        notes=[f"left out, not installed: {', '.join(missing)} (make bench-peers installs them)"] if missing else [],
        bystanders=share,
    ).finish(args.json, save=args.save)


def measure(running: dict[str, Arm], rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """(ms per step of each round, last loss, number of parameters); one round before the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, float] = {}
    num_params = 0
    for index in range(rounds + 1):
        order = list(running) if index % 2 == 0 else list(reversed(running))
        for name in order:
            answers = running[name].ask("steps", steps)
            if index:
                times[name].append(1e3 * max(seconds for seconds, _, _ in answers))
            losses[name] = sum(loss for _, loss, _ in answers) / len(answers)
            num_params = max(num_params, *(count for _, _, count in answers))
        line = ", ".join(f"{name} {values[-1]:.0f}" for name, values in times.items() if values)
        print(f"round {index}: {line or 'warm-up'}", file=sys.stderr, flush=True)
    return times, losses, num_params


def make_table(times: dict[str, list[float]], losses: dict[str, float]) -> str:
    """One row per arm; the loss after the same steps on the same data shows that all arms did the same work."""
    peers = [name for name in ("ddp", "fsdp2", "deepspeed-3") if name in times]
    rows = []
    for name, values in times.items():
        ratios = [report.ratio(values, times[peer]).text(2) if peer != name else "1" for peer in peers]
        rows.append([name, report.summarize(values).text(), *ratios, f"{losses[name]:.5f}"])
    header = ["arm", "ms per step: median (low - high)", *(f"x {peer}" for peer in peers), "loss at the end"]
    return report.table(header, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option(
        "--arms",
        nargs="+",
        choices=[*arms.ARMS, *arms.EXTRA_ARMS],
        default=arms.ARMS,
        metavar="ARM",
        help="which to run",
    )
    option("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    option("--steps", type=int, default=5, help="steps that an arm makes in each round (default: 5)")
    option("--model", default="25m", help="preset of examples/gpt.py (default: 25m)")
    option("--batch", type=int, default=1, help="sequences per rank and step (default: 1)")
    option("--seq", type=int, default=64, help="tokens per sequence (default: 64)")
    option("--json", type=Path, metavar="PATH", help="write the result here too")
    option("--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
