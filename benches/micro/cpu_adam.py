"""The CPU optimizer step: torch's fused AdamW, DeepSpeed's CPUAdam, shardcore's, and what memory allows.

    python benches/micro/cpu_adam.py --threads 1

All arms take turns in one process. The limit is the time in which a loop that computes next to nothing moves the bytes
of an fp32 step in place (reads p, g, m, v, writes p, m, v: 28 bytes an element). ``OMP_WAIT_POLICY=PASSIVE`` is set,
since threads of OpenMP that spin after their work take the core of whoever comes next. DeepSpeed compiles its operator
the first time; where it is not installed, its arms are left out and named.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")

import torch
from benches import report
from benches.machine import Bystanders

import shardcore as sc

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
LARGE_NUMEL = 25_000_000
MANY = {"1000 x 10k": (1_000, 10_000), "10000 x 1k": (10_000, 1_000)}
MAX_NORM = 1.0

Arm = Callable[[], None]


def fp32_params(count: int, numel: int) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    params = [torch.nn.Parameter(torch.full((numel,), 0.1)) for _ in range(count)]
    for param in params:
        param.grad = torch.full((numel,), 0.01)
    return params


def deepspeed_adam(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
    """DeepSpeed's optimizer; None where it is not installed or cannot be compiled."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS)
    except Exception as error:  # noqa: BLE001 - whatever a missing compiler or library raises
        print(f"DeepSpeed is left out: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None


def limit(numel: int, num_threads: int) -> Arm:
    """The bytes of an fp32 step, moved in place with next to no arithmetic.

    Momentum reads p, g, m and writes p, m: 20 bytes an element where AdamW moves 28, so it runs over 1.4 times as many.
    """
    count = numel * 28 // 20
    params = fp32_params(1, count)
    optimizer = sc.optim.CPUSGD(params, lr=1e-4, momentum=0.9, num_threads=num_threads)
    return optimizer.step


def step_arms(params: Callable[[], list[torch.nn.Parameter]], num_threads: int) -> dict[str, Arm]:
    """fp32 AdamW over the same tensors, in three libraries."""
    ours = sc.optim.CPUAdamW(params(), num_threads=num_threads, **OPTIONS)
    fused = torch.optim.AdamW(params(), fused=True, **OPTIONS)
    arms: dict[str, Arm] = {"shardcore": ours.step, "torch fused": fused.step}
    theirs = deepspeed_adam(params())
    if theirs is not None:
        arms["deepspeed"] = theirs.step
    return arms


def small_state_arms(num_threads: int) -> dict[str, Arm]:
    """Our own step with the states in 16 bits, and with split masters of bf16 parameters."""
    compact = sc.optim.CPUAdamW(fp32_params(1, LARGE_NUMEL), state_dtype="bf16", num_threads=num_threads, **OPTIONS)
    param = torch.nn.Parameter(torch.full((LARGE_NUMEL,), 0.1, dtype=torch.bfloat16))
    param.grad = torch.full((LARGE_NUMEL,), 0.01, dtype=torch.bfloat16)
    options = {**OPTIONS, "state_dtype": "bf16", "master": "split", "num_threads": num_threads}
    split = sc.optim.CPUAdamW([param], **options)
    return {"shardcore bf16 states": compact.step, "shardcore bf16 states, split master": split.step}


def host_step_arms(num_threads: int) -> dict[str, Arm]:
    """Norm, clip, update, bf16 copy: two passes over memory here, one for each in DeepSpeed."""
    params = fp32_params(1, LARGE_NUMEL)
    half = torch.zeros(LARGE_NUMEL, dtype=torch.bfloat16)
    ours = sc.optim.CPUAdamW(params, num_threads=num_threads, **OPTIONS)
    ours.copy_to(params[0], half)
    arms: dict[str, Arm] = {"shardcore host step": lambda: ours.step(max_grad_norm=MAX_NORM)}
    theirs = deepspeed_host_step(LARGE_NUMEL)
    if theirs is not None:
        arms["deepspeed host step"] = theirs
    return arms


def deepspeed_host_step(numel: int) -> Arm | None:
    """What DeepSpeed's optimizer of offloaded states does with its one flat tensor, pass by pass."""
    params = fp32_params(1, numel)
    optimizer = deepspeed_adam(params)
    if optimizer is None:
        return None
    half = torch.zeros(numel, dtype=torch.bfloat16)

    def sequence() -> None:
        grad = params[0].grad
        assert grad is not None
        grad.mul_(min(1.0, MAX_NORM / (float(grad.norm(2)) + 1e-6)))
        optimizer.step()
        half.copy_(params[0].data)

    return sequence


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """ms per step of each round; arms take turns, and the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        for name in arms if index % 2 == 0 else reversed(arms):
            start = time.perf_counter()
            arms[name]()
            if index:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def all_arms(num_threads: int) -> dict[str, dict[str, Arm]]:
    """Arms that are interleaved with each other, by what they measure."""
    large = {"limit": limit(LARGE_NUMEL, num_threads), **step_arms(lambda: fp32_params(1, LARGE_NUMEL), num_threads)}
    groups = {"25M": {**large, **small_state_arms(num_threads)}, "host step": host_step_arms(num_threads)}
    for name, (count, numel) in MANY.items():
        groups[name] = step_arms(partial(fp32_params, count, numel), num_threads)
    return groups


WANTED = [
    ("25M", "shardcore", "limit", 0.95),
    ("25M", "shardcore", "deepspeed", 0.97),
    ("25M", "shardcore", "torch fused", 1.0),
    ("25M", "shardcore bf16 states", "shardcore", 1.15),
    ("host step", "shardcore host step", "deepspeed host step", 1.7),
    ("1000 x 10k", "shardcore", "deepspeed", 1.5),
    ("10000 x 1k", "shardcore", "deepspeed", 4.0),
]
"""(arms, ours, theirs, how many times as fast ours should be)."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of every arm (default: 1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bystanders = Bystanders([])
    groups = {name: measure(arms, args.rounds) for name, arms in all_arms(args.threads).items()}
    share = bystanders.share()
    measured = [(group, arm, times) for group, arms in groups.items() for arm, times in arms.items()]
    rows = [[group, arm, report.summarize(times).text(2)] for group, arm, times in measured]
    reaches = [
        report.Reach(
            f"{name}: {ours} / {theirs}, ms", report.ratio(groups[name][ours], groups[name][theirs]), 1 / times
        )
        for name, ours, theirs, times in WANTED
        if theirs in groups[name]
    ]
    report.Result(
        recipe=f"cpu-adam-{args.threads}-threads",
        title=f"AdamW on the CPU, {args.threads} thread(s)",
        settings={
            "threads": args.threads,
            "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
            "rounds": args.rounds,
        },
        rounds={f"{group}: {arm}": times for group, arm, times in measured},
        unit="ms per step",
        table=report.table(["tensors", "arm", "ms per step: median (low - high)"], rows),
        reaches=reaches,
        bystanders=share,
    ).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
