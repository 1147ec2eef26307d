"""Time to save and load one training state on 2 ranks and one disk, against torch.save, torch DCP and DeepSpeed.

    python benches/e2e/checkpoint.py --folder /path/on/the/disk

Every arm holds the same state: fp32 weights and two moments, half on each rank (DeepSpeed writes the weights twice, as
the model's and as its optimizer's). "disk" is what the file system itself does in the same round: each rank writes and
reads as many bytes past the page cache in blocks of 4 MiB. What is saved is on the disk when the clock stops, and files
are dropped from the page cache before they are loaded. Shardcore's arm also saves in the background, where what counts
is by how much the call and the next step are longer, and loads from files that other ranks might have written.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.e2e import arms as trainings
from benches.machine import Bystanders
from benches.processes import NUM_RANKS, Arm, Handler

OURS, DISK = "shardcore", "disk"
PEERS = ("torch.save", "torch DCP", "deepspeed")
WIDTH = 1024
BLOCK = 4 << 20


def make_arm(name: str, settings: dict[str, Any]) -> Handler:
    """The handler of one rank."""
    import torch

    torch.manual_seed(int(os.environ["RANK"]))
    makers = {
        OURS: shardcore_arm,
        DISK: disk_arm,
        "torch.save": torch_arm,
        "torch DCP": dcp_arm,
        "deepspeed": deepspeed_arm,
    }
    commands = makers[name](Path(settings["folder"]) / name.replace(" ", "-"), settings["mebibytes"] << 20)

    def handle(command: str, argument: Any) -> float:
        if command in ("load", "load other files"):
            drop_caches(Path(settings["folder"]))
        barrier()
        start = time.perf_counter()
        spent = commands[command]()
        barrier()
        return spent if spent is not None else time.perf_counter() - start

    return handle


def barrier() -> None:
    """Wait for the other rank, where there is a process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def drop_caches(folder: Path) -> None:
    """Let the kernel forget the files' contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


Commands = dict[str, Callable[[], float | None]]


def layers(nbytes: int) -> nn.Module:
    """As many layers as make ``nbytes`` of weights and two moments on each rank."""
    from torch import nn

    num_layers = max(nbytes * NUM_RANKS // (12 * WIDTH * WIDTH), 1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def shardcore_arm(folder: Path, nbytes: int) -> Commands:
    """A model at stage 2 with AdamW after one step: a weight and two moments for each element."""
    import torch

    import shardcore as sc

    model = layers(nbytes)
    sc.shard(model, sc.Mesh(device="cpu"), stage=2)
    optimizer = sc.optimizer("adamw", model, fused=True)

    def step() -> float:
        model(torch.ones(1, WIDTH)).sum().backward()
        start = time.perf_counter()
        optimizer.step()
        spent = time.perf_counter() - start
        optimizer.zero_grad()
        return spent

    def save() -> None:
        sc.checkpoint.save(folder, model, optimizer, tag="it")
        if sc.Mesh(device="cpu").rank == 0 and not (folder / "others").exists():
            sc.checkpoint.reshard(folder / "it", folder / "others", NUM_RANKS + 1)

    def save_in_background() -> float:
        usual = step()
        start = time.perf_counter()
        sc.checkpoint.save(folder, model, optimizer, tag="later", async_=True)
        called = time.perf_counter() - start
        longer = max(step() - usual, 0.0)
        sc.checkpoint.wait(model)
        return called + longer

    step()
    return {
        "save": save,
        "load": lambda: void(sc.checkpoint.load(folder, model, optimizer, tag="it")),
        "load other files": lambda: void(sc.checkpoint.load(folder / "others", model, optimizer)),
        "save in background": save_in_background,
    }


def void(result: object) -> None:
    """Nothing, whatever there was."""


def state_of(nbytes: int) -> dict[str, Any]:
    """This rank's half as plain tensors of 4 MiB."""
    import torch

    return {f"t{i}": torch.randn(1 << 20) for i in range(max(nbytes >> 22, 1))}


def torch_arm(folder: Path, nbytes: int) -> Commands:
    """One file a rank."""
    import torch

    state = state_of(nbytes)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.environ['RANK']}.pt"

    def save() -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        for name, value in torch.load(path, weights_only=True).items():
            state[name].copy_(value)

    return {"save": save, "load": load}


def dcp_arm(folder: Path, nbytes: int) -> Commands:
    """Distributed tensors, each cut in two."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    state = {name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in state_of(nbytes).items()}

    def save() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True, overwrite=True))

    def load() -> None:
        with torch.no_grad():
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder))

    return {"save": save, "load": load}


def deepspeed_arm(folder: Path, nbytes: int) -> Commands:
    """The same model at the same stage; its files are pushed to the disk after it has written them."""
    import torch

    trainings.prepare_deepspeed()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = layers(nbytes)
    config = trainings.deepspeed_config(2, micro_batch=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()

    def save() -> None:
        engine.save_checkpoint(str(folder), tag="it")
        for path in folder.rglob("*.pt"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    return {"save": save, "load": lambda: void(engine.load_checkpoint(str(folder), tag="it"))}


def disk_arm(folder: Path, nbytes: int) -> Commands:
    """Plain blocks past the page cache."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / os.environ["RANK"]
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))

    def save() -> None:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, nbytes)
        for offset in range(0, nbytes, BLOCK):
            os.pwrite(descriptor, block, offset)
        os.fsync(descriptor)
        os.close(descriptor)

    def load() -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in range(0, nbytes, BLOCK):
            os.preadv(descriptor, [block], offset)
        os.close(descriptor)

    return {"save": save, "load": load}


def measure(arms: dict[str, Arm], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the slower rank; arms take turns, backwards in odd rounds; the first round does not count."""
    times: dict[str, list[float]] = {}
    for index in range(num_rounds + 1):
        for name in list(arms) if index % 2 == 0 else reversed(list(arms)):
            more = ["save in background", "load other files"] if name == OURS else []
            for command in ["save", "load", *more]:
                spent = max(arms[name].ask(command))
                if index:
                    times.setdefault(f"{command}, {name}", []).append(1e3 * spent)
    return times


def result(times: dict[str, list[float]], args: argparse.Namespace, share: float) -> report.Result:
    """The table and what was to be reached."""
    rows = [[what, report.summarize(values).text(0)] for what, values in sorted(times.items())]
    reaches = []
    for way in ("save", "load"):
        ours = times[f"{way}, {OURS}"]
        peers = [found for peer in PEERS if (found := times.get(f"{way}, {peer}"))]
        fastest = [min(these) for these in zip(*peers, strict=True)]
        reaches.append(report.Reach(f"time to {way} over the fastest peer's", report.ratio(ours, fastest), 1.0))
        disk = times[f"{way}, {DISK}"]
        reaches.append(report.Reach(f"time to {way} over the disk's", report.ratio(ours, disk), 1 / 0.85))
    saved, loaded = times[f"save, {OURS}"], times[f"load, {OURS}"]
    stalled, others = times[f"save in background, {OURS}"], times[f"load other files, {OURS}"]
    reaches.append(report.Reach("training stopped by a save in the background", report.ratio(stalled, saved), 0.05))
    reaches.append(report.Reach("load from other files", report.ratio(others, loaded), 1.3))
    return report.Result(
        recipe="checkpoint",
        title=f"Saving and loading {args.mebibytes} MiB on each of {NUM_RANKS} ranks",
        settings={"MiB per rank": args.mebibytes, "rounds": args.rounds},
        rounds=times,
        unit="ms",
        table=report.table(["what", "ms"], rows),
        reaches=reaches,
        bystanders=share,
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files are made")
    parser.add_argument("--mebibytes", type=int, default=384, help="bytes of each rank's half (default: 384)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    settings = {"folder": str(folder), "mebibytes": args.mebibytes}
    arms = {name: Arm(name, make_arm, settings) for name in (OURS, *PEERS, DISK) if trainings.is_available(name)}
    try:
        bystanders = Bystanders([pid for arm in arms.values() for pid in arm.pids])
        times = measure(arms, args.rounds)
        result(times, args, bystanders.share()).finish(args.json, save=args.save)
    finally:
        for arm in arms.values():
            arm.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
