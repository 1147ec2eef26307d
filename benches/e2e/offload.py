"""The optimizer step of states outside the device: on a disk against the bytes it moves, in host memory against torch.

    python benches/e2e/offload.py --folder /path/on/the/disk

One rank trains a bf16 model on the CPU. What counts is ``optimizer.step()``, and its peers, each in a process of its
own:

- "nvme" keeps masters and moments on a disk, without clipping and with it. "bytes alone" moves the same tiles in the
  same order between the same kind of file and memory, by the same engine, and updates nothing.
- "cpu" keeps them in host memory: norm, clip, update and the 16-bit weights. "torch" is ``clip_grad_norm_``, the fused
  AdamW over fp32 tensors and a copy to bf16; "deepspeed cpu_adam" is its kernel in the same sequence.
- "deepspeed nvme" is its engine at stage 3 with its pipelined swapper, without clipping. It compiles an operator, for
  which it needs the headers of libaio.

Disk traffic is the kernel's account of each process over a whole training step, beside what shardcore counts itself.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.e2e.arms import deepspeed_config, is_available, prepare_deepspeed
from benches.machine import Bystanders, disk_nbytes
from benches.processes import Arm, Handler

if TYPE_CHECKING:
    import torch
    from torch import nn

WIDTH = 1024
BLOCK_NUMEL = 8 * WIDTH * WIDTH
TILE_NUMEL, NUM_TILES = BLOCK_NUMEL // 2, 4
"""The library's defaults."""
MAX_NORM = 1.0
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

NVME, CLIPPED, BYTES, CPU, TORCH = "nvme", "nvme, clipped", "bytes alone", "cpu", "torch"
DEEPSPEED_CPU, DEEPSPEED_NVME = "deepspeed cpu_adam", "deepspeed nvme"
ARMS = (NVME, CLIPPED, BYTES, DEEPSPEED_NVME, CPU, TORCH, DEEPSPEED_CPU)
REACHES = [
    (NVME, BYTES, 1.087),
    (CLIPPED, BYTES, 1.087),
    (NVME, DEEPSPEED_NVME, 1.0),
    (CPU, TORCH, 1.0),
    (CPU, DEEPSPEED_CPU, 1.0),
]
"""(ours, theirs, how many times as long ours may take): of the speed of the bytes alone, 0.92."""
MOST_TRAFFIC = 24.0
"""Bytes read and written for a parameter in a step: masters and two moments in fp32, each way."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained, and where; the same in every arm."""

    folder: str
    num_blocks: int
    threads: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.num_blocks * BLOCK_NUMEL


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of an arm."""

    ms: float
    read: float
    """Bytes a parameter from the disk by the kernel's account, gradients' forward and backward included."""
    written: float
    counted_read: float
    """The same by the library's own counters."""
    counted_written: float


@dataclass(frozen=True, slots=True)
class Trainer:
    """How an arm makes a step."""

    step: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Gives the gradients; is not timed."""
    counted: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Bytes read and written so far, as the library counts them."""


def make_handler(name: str, settings: Settings) -> Handler:
    """Build the arm in its process; "step" gives a :class:`Sample`."""
    import torch

    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    trainer = TRAINERS[name](settings)

    def handle(_command: str, _argument: Any) -> Sample:
        kernel, counted = disk_nbytes(), trainer.counted()
        trainer.prepare()
        start = time.perf_counter()
        trainer.step()
        ms = 1e3 * (time.perf_counter() - start)
        ends = (*disk_nbytes(), *trainer.counted())
        moved = [(end - begin) / settings.numel for end, begin in zip(ends, (*kernel, *counted), strict=True)]
        return Sample(ms, *moved)

    return handle


def build_model(settings: Settings) -> nn.Sequential:
    """A chain of blocks of two bf16 layers."""
    import torch
    from torch import nn

    def layer(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)

    blocks = [nn.Sequential(layer(WIDTH, 4 * WIDTH), layer(4 * WIDTH, WIDTH)) for _ in range(settings.num_blocks)]
    return nn.Sequential(*blocks)


def rows() -> torch.Tensor:
    """The batch: one row."""
    import torch

    return torch.ones(1, WIDTH, dtype=torch.bfloat16)


def shardcore_trainer(settings: Settings, states: str, max_grad_norm: float | None) -> Trainer:
    """``sc.shard`` and ``sc.optimizer`` at stage 2."""
    import torch

    import shardcore as sc

    path = settings.folder if states == "nvme" else None
    offload = sc.Offload(states=states, grads="cpu", path=path, tile_numel=TILE_NUMEL, num_tiles=NUM_TILES)
    model = build_model(settings)
    sc.shard(model, sc.Mesh(device="cpu"), stage=2, precision="bf16", units=list(model), offload=offload)
    optimizer = sc.optimizer(torch.optim.AdamW, model, max_grad_norm=max_grad_norm, **OPTIONS)
    batch = rows()

    def prepare() -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()

    if states == "cpu":
        return Trainer(optimizer.step, prepare)
    store: Any = getattr(optimizer._update, "store")  # noqa: B009 - the update of tiles alone has one
    return Trainer(optimizer.step, prepare, lambda: (store.read_nbytes, store.written_nbytes))


def mover(settings: Settings) -> Trainer:
    """Tiles of the same sizes, there and back by turns, as :class:`shardcore.offload.TileStore` moves them."""
    import torch

    import shardcore as sc
    from shardcore.offload import TileSpec, TileStore

    offload = sc.Offload(states="nvme", path=settings.folder, tile_numel=TILE_NUMEL, num_tiles=NUM_TILES)
    tiles = [TileSpec(TILE_NUMEL, (torch.float32,) * 3)] * (settings.numel // TILE_NUMEL)
    store = TileStore(offload, tiles, sc.Mesh(device="cpu")["dp"])
    order = list(range(len(tiles)))

    def move() -> None:
        store.run(order, lambda tile, parts: True, is_step=True)
        order.reverse()

    return Trainer(move, counted=lambda: (store.read_nbytes, store.written_nbytes))


def torch_trainer(settings: Settings) -> Trainer:
    """Masters of a bf16 model, one for each layer, with gradients."""
    import torch

    half = [param.detach() for param in build_model(settings).parameters()]
    masters = [torch.nn.Parameter(param.float()) for param in half]
    for master in masters:
        master.grad = torch.full_like(master, 0.01)
    optimizer = torch.optim.AdamW(masters, fused=True, **OPTIONS)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        for param, master in zip(half, masters, strict=True):
            param.copy_(master.detach())

    return Trainer(step)


def deepspeed_cpu_trainer(settings: Settings) -> Trainer:
    """Its kernel, between a norm, a multiplication and a copy."""
    prepare_deepspeed()
    from benches.micro.cpu_adam import deepspeed_host_step

    step = deepspeed_host_step(settings.numel)
    if step is None:
        raise RuntimeError("its operator cpu_adam cannot be compiled")
    return Trainer(step)


def deepspeed_nvme_trainer(settings: Settings) -> Trainer:
    """Its engine, with buffers for as many sub-groups as shardcore has for tiles."""
    prepare_deepspeed()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    home = {"device": "nvme", "nvme_path": settings.folder, "pipeline_read": True, "pipeline_write": True}
    zero = {"offload_optimizer": {**home, "buffer_count": 16}, "sub_group_size": TILE_NUMEL}
    config = deepspeed_config(3, 1, zero)
    config |= {"bf16": {"enabled": True}, "aio": {"block_size": 1 << 20, "queue_depth": 32}}
    model = build_model(settings)
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **OPTIONS)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = rows()
    return Trainer(engine.step, lambda: engine.backward(engine(batch).float().square().mean()))


TRAINERS: dict[str, Callable[[Settings], Trainer]] = {
    NVME: lambda settings: shardcore_trainer(settings, "nvme", None),
    CLIPPED: lambda settings: shardcore_trainer(settings, "nvme", MAX_NORM),
    BYTES: mover,
    CPU: lambda settings: shardcore_trainer(settings, "cpu", MAX_NORM),
    TORCH: torch_trainer,
    DEEPSPEED_CPU: deepspeed_cpu_trainer,
    DEEPSPEED_NVME: deepspeed_nvme_trainer,
}


def start(names: list[str], settings: Settings) -> tuple[dict[str, Arm], list[str]]:
    """The arms that run here, and why others do not."""
    running: dict[str, Arm] = {}
    left_out = []
    for name in names:
        print(f"starting {name}", file=sys.stderr, flush=True)
        if not is_available(name):
            left_out.append(f"{name} is left out: DeepSpeed is not installed (make bench-peers installs it)")
            continue
        try:
            running[name] = Arm(name, make_handler, settings, num_ranks=1)
        except SystemExit as failure:
            if not name.startswith("deepspeed"):
                raise
            left_out.append(f"{name} is left out, it does not start here: {str(failure).strip().splitlines()[-1]}")
    return running, left_out


def measure(running: dict[str, Arm], num_rounds: int) -> dict[str, list[Sample]]:
    """One step of each arm in each round, backwards in odd rounds. Two rounds before the first do not count: the first
    step of states on a disk reads nothing, and writes where the file system has never been written.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in running}
    for index in range(-2, num_rounds):
        for name in running if index % 2 == 0 else reversed(running):
            [sample] = running[name].ask("step")
            if index >= 0:
                samples[name].append(sample)
        line = ", ".join(f"{name} {found[-1].ms:.0f}" for name, found in samples.items() if found)
        print(f"round {index + 1}: {line or 'warm-up'}", file=sys.stderr, flush=True)
    return samples


def result(samples: dict[str, list[Sample]], notes: list[str], args: argparse.Namespace, share: float) -> report.Result:
    """The tables and what was to be reached."""
    times = {name: [sample.ms for sample in found] for name, found in samples.items()}
    reaches = [
        report.Reach(f"{ours} / {theirs}, ms", report.ratio(times[ours], times[theirs]), most)
        for ours, theirs, most in REACHES
        if {ours, theirs} <= times.keys()
    ]
    traffic = [sample.read + sample.written for sample in samples.get(NVME, ())]
    if traffic:
        reaches.append(report.Reach("disk traffic of nvme, bytes a parameter", report.summarize(traffic), MOST_TRAFFIC))
    rounds = {f"{name}, ms": found for name, found in times.items()}
    rounds |= {f"{name}, bytes": [s.read + s.written for s in found] for name, found in samples.items()}
    return report.Result(
        recipe="offload",
        title=f"The step of offloaded states, {args.blocks * BLOCK_NUMEL / 1e6:.0f}M parameters in bf16",
        settings={
            "ranks": 1,
            "threads": args.threads,
            "elements of a tile": TILE_NUMEL,
            "clipped to": MAX_NORM,
            "rounds": args.rounds,
        },
        rounds=rounds,
        unit="ms per step; bytes read and written for a parameter in a step",
        table=f"{time_table(times)}\n\n{traffic_table(samples)}",
        reaches=reaches,
        notes=notes,
        bystanders=share,
    )


def time_table(times: dict[str, list[float]]) -> str:
    """One row per arm."""
    return report.table(
        ["arm", "ms per step: median (low - high)"],
        [[name, report.summarize(found).text()] for name, found in times.items()],
    )


def traffic_table(samples: dict[str, list[Sample]]) -> str:
    """Medians of what touches a disk."""

    def cell(values: list[float]) -> str:
        return f"{report.summarize(values).median:.2f}"

    found = {name: steps for name, steps in samples.items() if any(step.read or step.written for step in steps)}
    kinds = ("read", "written", "counted_read", "counted_written")
    lines = [
        [name, *(cell([getattr(step, kind) for step in steps]) for kind in kinds)] for name, steps in found.items()
    ]
    head = ["bytes a parameter and step", "kernel: read", "kernel: written", "counted: read", "counted: written"]
    return report.table(head, lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=f"of {', '.join(ARMS)}")
    option("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk, where the files are made")
    option("--blocks", type=int, default=8, help="blocks of 8.4M parameters (default: 8)")
    option("--threads", type=int, default=1, help="threads of every arm (default: 1)")
    option("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    option("--json", type=Path, metavar="PATH", help="write the result here too")
    option("--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)")
    args = parser.parse_args()
    if args.blocks * 2 <= NUM_TILES:
        parser.error(
            f"--blocks {args.blocks}: all tiles would stay in host memory; expected {NUM_TILES // 2 + 1} or more"
        )
    folder = tempfile.mkdtemp(dir=args.folder)
    running: dict[str, Arm] = {}
    try:
        running, notes = start(args.arms, Settings(folder, args.blocks, args.threads))
        bystanders = Bystanders([pid for arm in running.values() for pid in arm.pids])
        samples = measure(running, args.rounds)
        share = bystanders.share()
        if any(sample.counted_read and not sample.read for found in samples.values() for sample in found):
            raise SystemExit(f"{args.folder} is on no disk, as the kernel accounts for it: give another --folder")
        result(samples, notes, args, share).finish(args.json, save=args.save)
    finally:
        for arm in running.values():
            arm.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
