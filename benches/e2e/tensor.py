"""Time of forward and backward through transformer blocks split over tensor-parallel ranks: shardcore, and torch's
DTensor by ``parallelize_module``, interleaved in one run.

    python benches/e2e/tensor.py --width 512 --tokens 512

``torch`` follows torch's tutorial; in ``torch-shared`` the input of each block becomes a DTensor once for all of its
projections (``PrepareModuleInput``), so that its gradient is summed once. The target is against the faster of the two.
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

ARMS = ["shardcore", "torch", "torch-shared"]
AT_MOST = 0.9


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run; the same in every arm."""

    width: int
    heads: int
    layers: int
    tokens: int
    ranks: int


def make_handler(arm: str, settings: Settings) -> Handler:
    """Build the arm in this rank; the handler then answers ``steps``: n -> (seconds per step, loss)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(THREADS_PER_RANK)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model(settings)
    if arm == "shardcore":
        _split_by_shardcore(model, settings)
    else:
        _split_by_torch(model, settings, shared=arm == "torch-shared")
    x = torch.randn(1, settings.tokens, settings.width)
    losses = []

    def step() -> None:
        loss = model(x.requires_grad_()).square().mean()
        loss.backward()
        losses.append(loss.detach())
        for param in model.parameters():
            param.grad = None

    def handle(command: str, argument: Any) -> tuple[float, float]:
        step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(int(argument)):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / int(argument), float(losses[-1])

    return handle


def make_model(settings: Settings) -> Any:
    """Blocks as Llama's, without rotary positions. Their forward works on as many heads as the projections give."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, head_dim = settings.width, settings.width // settings.heads

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim = head_dim
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = (layer(x).unflatten(-1, (-1, head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
            q, k, v = (part.transpose(1, 2) for part in parts)
            return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, False) for _ in range(2))
            self.down_proj = nn.Linear(3 * width, width, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.attention, self.mlp = Attention(), Perceptron()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    return nn.Sequential(*(Block() for _ in range(settings.layers)))


def _split_by_shardcore(model: Any, settings: Settings) -> None:
    import shardcore as sc

    sc.tensor.parallelize(model, sc.Mesh(tp=settings.ranks, device="cpu"))


def _split_by_torch(model: Any, settings: Settings, *, shared: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (settings.ranks,))
    plan: dict[str, Any] = {}
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    for name in ("attention.o_proj", "mlp.down_proj"):
        plan[name] = RowwiseParallel()
    if shared:
        for name in ("attention", "mlp"):
            plan[name] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    for block in model:
        parallelize_module(block, mesh, plan)


def main() -> None:
    """Measure and report."""
    args = parse_arguments()
    settings = Settings(args.width, args.heads, args.layers, args.tokens, args.ranks)
    running = {name: Arm(name, make_handler, settings, args.ranks) for name in ARMS}
    bystanders = Bystanders([pid for arm in running.values() for pid in arm.pids])
    times: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, float] = {}
    for index in range(args.rounds + 1):
        for name in list(running) if index % 2 == 0 else list(reversed(running)):
            answers = running[name].ask("steps", args.steps)
            losses[name] = answers[0][1]
            if index:
                times[name].append(1e3 * max(seconds for seconds, _ in answers))
    share = bystanders.share()
    for arm in running.values():
        arm.close()
    best = min(ARMS[1:], key=lambda name: sorted(times[name])[len(times[name]) // 2])
    reach = report.Reach(f"shardcore / {best}", report.ratio(times["shardcore"], times[best]), AT_MOST)
    rows = [[name, report.summarize(values).text(2), f"{losses[name]:.6f}"] for name, values in times.items()]
    report.Result(
        recipe=f"tensor-{args.width}-{args.tokens}-tokens",
        title=f"Milliseconds per step, {args.layers} blocks of width {args.width}, {args.ranks} tensor-parallel ranks",
        settings={key: str(value) for key, value in vars(args).items() if key not in ("json", "save")},
        rounds=times,
        unit="ms per step",
        table=report.table(["arm", "ms per step: median (low - high)", "loss"], rows),
        reaches=[reach],
        notes=[],
        bystanders=share,
    ).finish(args.json, save=args.save)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--ranks", type=int, default=2, help="ranks, each a process with one thread (default: 2)")
    option("--width", type=int, default=512, help="features of an activation (default: 512)")
    option("--heads", type=int, default=8, help="attention heads (default: 8)")
    option("--layers", type=int, default=4, help="blocks (default: 4)")
    option("--tokens", type=int, default=256, help="tokens of a step (default: 256)")
    option("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    option("--steps", type=int, default=5, help="steps that an arm makes in each round (default: 5)")
    option("--json", type=Path, metavar="PATH", help="write the result here too")
    option("--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
