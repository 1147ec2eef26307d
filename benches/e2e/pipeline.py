"""Time per step of a pipeline: shardcore and torch.distributed.pipelining run the same schedule over the same layers,
interleaved in one run; and what a schedule's bubble is against what its simulation says.

    python benches/e2e/pipeline.py --action-ms 0.5
    python benches/e2e/pipeline.py --sleep --ranks 4 --schedule zb-h1

With ``--sleep`` stages sleep instead of computing, so that more ranks than cores can be measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.machine import Bystanders
from benches.processes import THREADS_PER_RANK, Arm, Handler

ARMS = ["shardcore", "torch"]
WIDTH = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run; the same in every arm."""

    ranks: int
    schedule: str
    num_microbatches: int
    action_s: float
    """How long a forward takes on a rank."""
    sleeps: bool


def make_handler(arm: str, settings: Settings) -> Handler:
    """Build the arm in this rank; the handler then answers ``steps``: n -> seconds per step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(THREADS_PER_RANK)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    build = {"shardcore": _shardcore, "torch": _torch}[arm]
    step = build(settings)

    def handle(command: str, argument: Any) -> float:
        step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(int(argument)):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / int(argument)

    return handle


def _stage(settings: Settings, num_stages: int) -> Any:
    """A layer whose forward takes its part of ``action_s``, and its backward about twice that."""
    import torch
    from torch import nn

    if settings.sleeps:
        return _sleeper(settings.action_s * settings.ranks / num_stages)
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(_rows(), WIDTH)
    layer(x)
    start = time.perf_counter()
    for _ in range(20):
        layer(x)
    once = (time.perf_counter() - start) / 20
    count = torch.tensor([max(1, round(settings.action_s * settings.ranks / num_stages / once))])
    torch.distributed.broadcast(count, 0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(int(count))))


def _rows() -> int:
    return 64


def _sleeper(seconds: float) -> Any:
    """Sleeps for ``seconds`` in its forward, its input's gradient and its weight's gradient each."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(2 * seconds)
            return grad, grad.sum().reshape(1)

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sleep.apply(x, self.weight)

    return Sleeper()


def _shardcore(settings: Settings) -> Any:
    import torch

    import shardcore as sc
    from shardcore import plan

    mesh = sc.Mesh(pp=settings.ranks, device="cpu")
    schedule = plan.pipeline_schedule(settings.schedule, settings.ranks, settings.num_microbatches)
    layers = [_stage(settings, schedule.num_stages) for _ in range(schedule.num_stages)]
    pipe = sc.pipeline.Pipeline(
        layers,
        mesh,
        schedule=schedule,
        num_microbatches=settings.num_microbatches,
        loss_fn=lambda y, _: y.square().mean(),
        partition="uniform",
    )
    x = torch.randn(_rows(), WIDTH)

    def step() -> None:
        pipe.train_batch(iter([(x, None)] * settings.num_microbatches))
        pipe.zero_grad()

    return step


def _torch(settings: Settings) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    layers = [_stage(settings, settings.ranks) for _ in range(settings.ranks)]
    stage = PipelineStage(layers[rank], rank, settings.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, settings.num_microbatches, loss_fn=lambda y, _: y.square().mean())
    x = torch.randn(_rows() * settings.num_microbatches, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        elif rank == settings.ranks - 1:
            schedule.step(target=x)
        else:
            schedule.step()
        layers[rank].zero_grad()

    return step


def main() -> None:
    """Measure and report."""
    args = parse_arguments()
    settings = Settings(args.ranks, args.schedule, args.micro_batches, args.action_ms / 1e3, args.sleep)
    names = ARMS if args.schedule == "1f1b" else ARMS[:1]
    running = {name: Arm(name, make_handler, settings, args.ranks) for name in names}
    bystanders = Bystanders([pid for arm in running.values() for pid in arm.pids])
    times: dict[str, list[float]] = {name: [] for name in running}
    for index in range(args.rounds + 1):
        for name in list(running) if index % 2 == 0 else list(reversed(running)):
            seconds = max(running[name].ask("steps", args.steps))
            if index:
                times[name].append(1e3 * seconds)
    share = bystanders.share()
    for arm in running.values():
        arm.close()
    at_most = 1.0 if args.action_ms >= 10 else 0.95
    reaches = []
    if "torch" in times and not args.sleep:
        ratio = report.ratio(times["shardcore"], times["torch"])
        reaches.append(report.Reach("shardcore / torch", ratio, at_most))
    if args.sleep:
        reaches.append(_against_simulation(settings, times["shardcore"]))
    rows = [[name, report.summarize(values).text(2)] for name, values in times.items()]
    report.Result(
        recipe=f"pipeline-{args.schedule}-{args.action_ms:g}ms-{args.ranks}-ranks",
        title=f"Milliseconds per step, {args.schedule}, {args.ranks} ranks, {args.micro_batches} micro-batches",
        settings={key: str(value) for key, value in vars(args).items() if key not in ("json", "save")},
        rounds=times,
        unit="ms per step",
        table=report.table(["arm", "ms per step: median (low - high)"], rows),
        reaches=reaches,
        notes=[],
        bystanders=share,
    ).finish(args.json, save=args.save)


def _against_simulation(settings: Settings, times: list[float]) -> report.Reach:
    """How far the measured bubble lies from the simulated one, in parts of that."""
    from shardcore import plan

    schedule = plan.pipeline_schedule(settings.schedule, settings.ranks, settings.num_microbatches)
    run = schedule.simulate(settings.action_s, settings.action_s, settings.action_s)
    busy = sum(run.busy) / len(run.busy)
    simulated = 1 - busy / run.makespan
    measured = [1 - 1e3 * busy / each for each in times]
    off = [abs(each - simulated) / simulated for each in measured]
    return report.Reach("distance of the bubble from the simulated one", report.summarize(off), 0.10)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--ranks", type=int, default=2, help="ranks, each a process with one thread (default: 2)")
    option("--schedule", default="1f1b", help="a name of plan.pipeline_schedule; torch joins for 1f1b (default)")
    option("--micro-batches", type=int, default=8, help="micro-batches of a step (default: 8)")
    option("--action-ms", type=float, default=50.0, help="how long a forward takes on a rank (default: 50)")
    option("--sleep", action="store_true", help="stages sleep; their backward is fused, as long as two forwards")
    option("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    option("--steps", type=int, default=3, help="steps that an arm makes in each round (default: 3)")
    option("--json", type=Path, metavar="PATH", help="write the result here too")
    option("--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
