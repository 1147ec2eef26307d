"""What stage 3 costs besides arithmetic: 1,000 tiny modules, against FSDP2 and DeepSpeed, interleaved in one run.

    python benches/e2e/tiny_modules.py --rounds 7

``Linear(16)`` a thousand times, batch 8: gathers and reductions of a few bytes, so that hooks, bookkeeping and the
start of collectives are nearly all of a step. The overhead of an arm is its step less that of the plain loop, in which
each rank trains alone. Every arm shards every parameter: DeepSpeed would by default keep parameters this small whole
on every rank, hence its ``stage3_param_persistence_threshold`` is 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.e2e import arms
from benches.machine import Bystanders
from benches.processes import NUM_RANKS, THREADS_PER_RANK, Arm, Handler

if TYPE_CHECKING:
    import torch
    from torch import nn

NUM_MODULES, WIDTH, BATCH = 1000, 16, 8
ARMS = ("plain", "shardcore-3", "fsdp2", "deepspeed-3")
REACHES = [("fsdp2", 1.0), ("deepspeed-3", 0.5)]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained; the same in every arm."""

    modules_per_unit: int


def build_model(modules_per_unit: int) -> nn.Module:
    """A chain of ``NUM_MODULES`` tiny layers with residuals, cut into ``blocks`` of ``modules_per_unit``."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(modules_per_unit))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x) / NUM_MODULES
            return x

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(NUM_MODULES // modules_per_unit))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    return Chain()


def mean_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The loss: fp32 [batch, width] -> scalar."""
    return model(batch).square().mean()


def make_handler(arm: str, settings: Settings) -> Handler:
    """Build the arm in this rank; ``steps``: n -> (seconds per step after one that is not counted, last loss)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(THREADS_PER_RANK)
    zero = {"stage3_param_persistence_threshold": 0}
    step = arms.build(arm, build_model(settings.modules_per_unit), BATCH, loss=mean_square, zero=zero)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def steps(_command: str, count: Any) -> tuple[float, float]:
        batches = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count + 1)]
        step(batches.pop())
        dist.barrier()
        start = time.perf_counter()
        for batch in batches:
            loss = step(batch)
        dist.barrier()
        return (time.perf_counter() - start) / count, float(loss)

    return steps


def measure(running: dict[str, Arm], rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(ms per step of each round, last loss averaged over ranks); one round before the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, float] = {}
    for index in range(rounds + 1):
        for name in running if index % 2 == 0 else reversed(running):
            answers = running[name].ask("steps", steps)
            losses[name] = sum(loss for _, loss in answers) / len(answers)
            if index:
                times[name].append(1e3 * max(seconds for seconds, _ in answers))
        line = ", ".join(f"{name} {values[-1]:.0f}" for name, values in times.items() if values)
        print(f"round {index}: {line or 'warm-up'}", file=sys.stderr, flush=True)
    return times, losses


def main() -> None:
    """Measure and report."""
    args = parse_arguments()
    names = [arm for arm in args.arms if arms.is_available(arm)]
    settings = Settings(modules_per_unit=args.modules_per_unit)
    running = {name: Arm(name, make_handler, settings) for name in names}
    bystanders = Bystanders([pid for arm in running.values() for pid in arm.pids])
    times, losses = measure(running, args.rounds, args.steps)
    share = bystanders.share()
    for arm in running.values():
        arm.close()
    above = {name: [ms - alone for ms, alone in zip(times[name], times["plain"], strict=True)] for name in names[1:]}
    missing = [arm for arm in args.arms if arm not in names]
    report.Result(
        recipe=f"tiny-modules-{args.modules_per_unit}",
        title=f"Stage 3 on {NUM_MODULES} Linear({WIDTH}), {args.modules_per_unit} to a unit",
        settings={
            "ranks": NUM_RANKS,
            "threads per rank": THREADS_PER_RANK,
            "dtype": "fp32",
            "optimizer": "fused AdamW",
            "batch": BATCH,
            "rounds": args.rounds,
            "steps per round": args.steps,
        },
        rounds=times,
        unit="ms per step",
        table=make_table(times, above, losses),
        reaches=[
            report.Reach(f"overhead: shardcore-3 / {peer}", report.ratio(above["shardcore-3"], above[peer]), most)
            for peer, most in REACHES
            if {peer, "shardcore-3"} <= above.keys()
        ],
        notes=[f"left out, not installed: {', '.join(missing)} (make bench-peers installs them)"] if missing else [],
        bystanders=share,
    ).finish(args.json, save=args.save)


def make_table(times: dict[str, list[float]], above: dict[str, list[float]], losses: dict[str, float]) -> str:
    """One row per arm; arms that exchange gradients end with the same loss."""
    rows = [["plain", report.summarize(times["plain"]).text(), "0", "(no exchange)"]]
    for name, values in above.items():
        step = report.summarize(times[name]).text()
        rows.append([name, step, report.summarize(values).text(), f"{losses[name]:.6f}"])
    return report.table(["arm", "ms per step: median (low - high)", "ms above plain", "loss at the end"], rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="which to run besides plain")
    option("--modules-per-unit", type=int, default=10, help="tiny modules in a wrap unit (default: 10)")
    option("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    option("--steps", type=int, default=3, help="steps that an arm makes in each round (default: 3)")
    option("--json", type=Path, metavar="PATH", help="write the result here too")
    option("--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)")
    args = parser.parse_args()
    args.arms = ["plain", *(arm for arm in args.arms if arm != "plain")]
    if NUM_MODULES % args.modules_per_unit:
        parser.error(f"--modules-per-unit {args.modules_per_unit} does not divide {NUM_MODULES}")
    return args


if __name__ == "__main__":
    main()
