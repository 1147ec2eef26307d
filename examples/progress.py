"""What a training run shows: a line every few steps, the validation loss, and a picture of both at the end."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of each rank's ``values``, on every rank. Collective."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest of the ranks' values, on every rank. Collective."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()


def peak_nbytes(device: torch.device) -> int:
    """The most memory this process has held so far: of the GPU where it uses one, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


class Progress:
    """Collects the loss of each step; every rank calls the same methods, rank 0 prints.

    Args:
        validate: collective; returns the validation loss.
        tokens_per_step: of all ranks together.
    """

    def __init__(
        self, validate: Callable[[], float], *, num_steps: int, tokens_per_step: int, every: int, validate_every: int
    ) -> None:
        self.validate = validate
        self.num_steps = num_steps
        self.tokens_per_step = tokens_per_step
        self.every = every
        self.validate_every = validate_every
        self.train_curve: list[tuple[int, float]] = []
        self.valid_curve: list[tuple[int, float]] = []
        self._losses: list[torch.Tensor] = []
        self._last_step = 0
        self._clock = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        """Take one micro-batch's share of this rank's loss; reading its value waits until a line is due."""
        self._losses.append(loss.detach())

    def end_step(self, step: int, lr: float, grad_norm: float) -> None:
        """Print and validate where it is time to. Collective."""
        if step == 1 or step % self.every == 0 or step == self.num_steps:
            self._line(step, lr, grad_norm)
        if step % self.validate_every == 0 or step == self.num_steps:
            loss = self.validate()
            self.valid_curve.append((step, loss))
            say(f"step {step:>5}/{self.num_steps}  val loss {loss:.3f}")
            self._clock = time.perf_counter()

    def _line(self, step: int, lr: float, grad_norm: float) -> None:
        num_steps = step - self._last_step
        device = self._losses[0].device
        mine = torch.stack([torch.stack(self._losses).double().sum() / num_steps, torch.ones((), device=device)])
        total, num_ranks = sum_over_ranks(mine).tolist()
        seconds = time.perf_counter() - self._clock
        memory = max_over_ranks(peak_nbytes(device), device)
        say(
            f"step {step:>5}/{self.num_steps}  loss {total / num_ranks:.3f}  lr {lr:.2e}  grad norm {grad_norm:5.2f}  "
            f"{num_steps * self.tokens_per_step / seconds:,.0f} tokens/s  memory {memory / 2**20:,.0f} MiB per rank"
        )
        self.train_curve.append((step, total / num_ranks))
        self._losses.clear()
        self._last_step, self._clock = step, time.perf_counter()

    def draw(self, path: Path) -> None:
        """Write the loss curves as a PNG, where matplotlib is installed."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            say("no loss curve drawn: it needs matplotlib (pip install 'shardcore-torch[examples]')")
            return
        axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
        axes.plot(*zip(*self.train_curve, strict=True), label="training")
        axes.plot(*zip(*self.valid_curve, strict=True), marker="o", label="validation")
        axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150)
        say(f"loss curve: {path}")


def say(line: str) -> None:
    """Print on rank 0 alone, at once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)
