"""What recomputation saves and costs: one process, a stack of GPT blocks, each policy against keeping everything.

    python benches/micro/activation.py

Bytes are counted exactly, over all tensors: what lives after the forward and did not before, and the most that live at
any moment of a step. On a CPU device host memory is the device's own, so the copies to it are pure cost here; the bytes
that would leave a GPU stand in a column of their own.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import torch
import torch.nn.functional as F
from benches import report
from benches.machine import Bystanders
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardcore import activation
from shardcore.offload import PassingStore
from shardcore.testing import PeakTensorBytes

NUM_BLOCKS, WIDTH, HEADS, BATCH, LENGTH = 8, 256, 4, 2, 128
ARMS: dict[str, dict[str, Any] | None] = {
    "keep everything": None,
    "torch's checkpoint": None,
    "full": {},
    "selective": {"policy": "selective"},
    "full, offload": {"offload": "cpu"},
    "full, contiguous": {"contiguous": True},
}
AT_MOST = {"full": 1.05, "selective": 1.0, "full, contiguous": 1.1}
"""Times of torch's checkpoint."""


class Block(nn.Module):
    """A GPT block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] in and out."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1)


class ByTorch(nn.Module):
    """A block that torch recomputes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the block."""
        return torch_checkpoint(self.block, x, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of one arm."""

    after_forward: int
    peak: int
    host: int


def build(arm: str) -> nn.Sequential:
    """The stack, recomputed as the arm says."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    if arm == "torch's checkpoint":
        return nn.Sequential(*(ByTorch(block) for block in model))
    options = ARMS[arm]
    return model if options is None else activation.wrap(model, units=[Block], **options)


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward."""
    model(x).square().mean().backward()


def count(model: nn.Module, x: torch.Tensor) -> Kept:
    """Bytes of a step after the first one, in which buffers are made."""
    step(model, x)
    forward = getattr(model[0], "forward", None)
    keeper = getattr(getattr(forward, "settings", None), "keeper", None)
    home = getattr(keeper, "home", None)
    gc.collect()
    with PeakTensorBytes() as live:
        loss = model(x).square().mean()
        after_forward = live.current_nbytes() - live.start_nbytes
        loss.backward()
    host = home.host_nbytes if isinstance(home, PassingStore) else 0
    buffers = getattr(home, "nbytes", 0) if not host else 0
    return Kept(after_forward + buffers, live.peak_nbytes - live.start_nbytes + buffers, host)


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """ms per step of each round; arms take turns, and the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name in steps if index % 2 == 0 else reversed(steps):
            steps[name]()
            start = time.perf_counter()
            steps[name]()
            if index:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: 9)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument("--save", action="store_true", help="keep the result in benches/results (quiet machine only)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    models = {arm: build(arm) for arm in ARMS}
    kept = {arm: count(model, x) for arm, model in models.items()}
    bystanders = Bystanders([])
    times = measure({arm: lambda model=model: step(model, x) for arm, model in models.items()}, args.rounds)
    ratios = {arm: report.ratio(values, times["torch's checkpoint"]) for arm, values in times.items()}
    rows = [
        [arm, *(f"{n / 2**20:.1f}" for n in (k.after_forward, k.peak, k.host)), report.summarize(times[arm]).text(1),
         ratios[arm].text(2)]
        for arm, k in kept.items()
    ]  # fmt: skip
    header = ["blocks", "MiB kept", "MiB at the peak", "MiB in host memory", "ms per step", "x torch's checkpoint"]
    report.Result(
        recipe="activation",
        title=f"Recomputation: {NUM_BLOCKS} GPT blocks of width {WIDTH}, batch {BATCH} x {LENGTH}",
        settings={"threads": 1, "dtype": "fp32", "rounds": args.rounds},
        rounds=times,
        unit="ms per step",
        table=report.table(header, rows),
        reaches=[report.Reach(f"{arm} / torch's checkpoint", ratios[arm], most) for arm, most in AT_MOST.items()],
        bystanders=bystanders.share(),
    ).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
