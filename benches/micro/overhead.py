"""What the library itself costs: one process, 200 small layers, against the plain torch loop.

    python benches/micro/overhead.py

At world 1 nothing is sent, so whatever a step takes longer than the plain loop is hooks, bookkeeping and copies. Both
ways in are measured: the native loop, and the engine of ``shardcore.initialize``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import torch
from benches import report
from benches.machine import Bystanders
from torch import nn

import shardcore as sc

NUM_LAYERS, WIDTH, BATCH, LAYERS_PER_UNIT = 200, 256, 64, 10
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "fused": True}
AT_MOST = {0: 1.15, 1: 1.15, 2: 1.15, 3: 1.4}

Step = Callable[[torch.Tensor], None]


class Unit(nn.Module):
    """Ten layers: the repeated block of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS_PER_UNIT)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build_model() -> nn.Sequential:
    """Twenty units of ten ``Linear(256)``."""
    torch.manual_seed(0)
    return nn.Sequential(*(Unit() for _ in range(NUM_LAYERS // LAYERS_PER_UNIT)))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop as everyone writes it."""

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain() -> Step:
    """torch alone."""
    model = build_model()
    return loop(model, torch.optim.AdamW(model.parameters(), **OPTIONS))


def native(stage: int) -> Step:
    """``shardcore.shard`` and ``shardcore.optimizer``."""
    model = build_model()
    sc.shard(model, sc.Mesh(device="cpu"), stage=stage, units=[Unit])
    return loop(model, sc.optimizer(torch.optim.AdamW, model, **OPTIONS))


def engine(stage: int) -> Step:
    """``shardcore.initialize``; clipping is off, as in the plain loop."""
    model = build_model()
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    wrapped, _, _, _ = sc.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: torch.Tensor) -> None:
        loss = wrapped(batch).square().mean()
        wrapped.backward(loss)
        wrapped.step()

    return step


def measure(steps: dict[str, Step], rounds: int, num_steps: int) -> dict[str, list[float]]:
    """ms per step of each round; arms take turns, and the first round is not counted."""
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name in steps if index % 2 == 0 else reversed(steps):
            steps[name](batch)  # refill caches after the arm before
            start = time.perf_counter()
            for _ in range(num_steps):
                steps[name](batch)
            if index:
                times[name].append(1e3 * (time.perf_counter() - start) / num_steps)
    return times


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: 15)")
    parser.add_argument("--steps", type=int, default=5, help="steps of an arm in each round (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = {"plain": plain()}
    steps |= {f"native-{stage}": native(stage) for stage in AT_MOST} | {
        f"engine-{stage}": engine(stage) for stage in AT_MOST
    }
    bystanders = Bystanders([])
    times = measure(steps, args.rounds, args.steps)
    share = bystanders.share()
    ratios = {name: report.ratio(values, times["plain"]) for name, values in times.items()}
    rows = [[name, report.summarize(times[name]).text(2), ratios[name].text(3)] for name in times]
    report.Result(
        recipe="overhead",
        title=f"Overhead at world 1: {NUM_LAYERS} Linear({WIDTH}), batch {BATCH}, units of {LAYERS_PER_UNIT}",
        settings={
            "threads": 1,
            "dtype": "fp32",
            "optimizer": "fused AdamW",
            "rounds": args.rounds,
            "steps per round": args.steps,
        },
        rounds=times,
        unit="ms per step",
        table=report.table(["arm", "ms per step: median (low - high)", "x plain"], rows),
        reaches=[
            report.Reach(f"{name} / plain", r, AT_MOST[int(name[-1])]) for name, r in ratios.items() if name != "plain"
        ],
        bystanders=share,
    ).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
