"""How fast ``shardcore.offload.IoEngine`` writes and reads a file, against fio at the same block and depth.

    python benches/micro/io.py --folder /path/on/the/disk

Every arm writes a whole file of its own over, then reads it, past the page cache, in blocks of ``--block-kib`` with
``--depth`` of them under way. Files are written once before anything is measured, so that no arm allocates space. Where
fio is not installed, the engine is held against the loop alone: one thread that writes (reads) one block after the
other, which is a weaker rival and is named so.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import report
from benches.machine import Bystanders

FIO, LOOP = "fio io_uring", "loop, one block at a time"
ENGINES = {"shardcore io_uring": "io_uring", "shardcore threads": "threads"}
LIMIT = 1 / 0.9
"""Time against fio's: at least 0.9 of its rate."""

Arm = Callable[[str], float]
"""Moves the file once in the direction ``write`` or ``read``; seconds."""


def engine_arm(backend: str, path: Path, args: argparse.Namespace) -> Arm:
    """Whole-file requests by the engine, from and into a registered pool."""
    import torch

    from shardcore.offload import HostPool, IoEngine

    engine = IoEngine(queue_depth=args.depth, block_nbytes=args.block_kib << 10, backend=backend, direct="on")
    pool = HostPool(args.mebibytes << 20)
    registered = pool.register(engine)
    print(f"# {engine!r}, registered memory: {registered}", file=sys.stderr)
    tensor = pool.tensor(args.mebibytes << 20, torch.uint8)
    tensor.random_(0, 256)

    def move(direction: str) -> float:
        start = time.perf_counter()
        request = engine.write if direction == "write" else engine.read
        request(path, tensor).wait()
        return time.perf_counter() - start

    return move


def fio_arm(path: Path, args: argparse.Namespace) -> Arm:
    """The same by fio, which reports its own time without its start."""

    def move(direction: str) -> float:
        command = [
            "fio",
            "--name=bench",
            f"--filename={path}",
            f"--rw={direction}",
            "--ioengine=io_uring",
            "--direct=1",
        ]
        command += [f"--bs={args.block_kib}k", f"--iodepth={args.depth}", f"--size={args.mebibytes}m"]
        command += ["--fixedbufs=1", "--overwrite=1", "--output-format=json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout)["jobs"][0][direction]
        return job["io_bytes"] / job["bw_bytes"]

    return move


def loop_arm(path: Path, args: argparse.Namespace) -> Arm:
    """One thread, one block at a time, as ``dd`` does."""
    block = mmap.mmap(-1, args.block_kib << 10)
    block.write(os.urandom(len(block)))

    def move(direction: str) -> float:
        flags = os.O_WRONLY if direction == "write" else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_DIRECT)
        start = time.perf_counter()
        for offset in range(0, args.mebibytes << 20, len(block)):
            moved = (
                os.pwrite(descriptor, block, offset) if direction == "write" else os.preadv(descriptor, [block], offset)
            )
            assert moved == len(block)
        spent = time.perf_counter() - start
        os.close(descriptor)
        return spent

    return move


def make_arms(folder: Path, args: argparse.Namespace) -> dict[str, Arm]:
    """All arms, each with a file that has its space already."""
    names = [*ENGINES, *([FIO] if shutil.which("fio") else []), LOOP]
    arms: dict[str, Arm] = {}
    for index, name in enumerate(names):
        path = folder / f"file{index}"
        with path.open("wb") as file:
            for _ in range(args.mebibytes):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        if name in ENGINES:
            arms[name] = engine_arm(ENGINES[name], path, args)
        else:
            arms[name] = fio_arm(path, args) if name == FIO else loop_arm(path, args)
    return arms


def measure(arms: dict[str, Arm], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds per arm and direction; arms take turns, backwards in odd rounds; the first round does not count."""
    times: dict[str, list[float]] = {}
    for index in range(num_rounds + 1):
        for name in list(arms) if index % 2 == 0 else reversed(list(arms)):
            for direction in ("write", "read"):
                spent = arms[name](direction)
                if index:
                    times.setdefault(f"{direction}, {name}", []).append(1e3 * spent)
    return times


def result(times: dict[str, list[float]], args: argparse.Namespace, share: float) -> report.Result:
    """The table and what was to be reached."""
    names = list(dict.fromkeys(key.partition(", ")[2] for key in times))
    rows = [[name, *(_rate(times[f"{way}, {name}"], args).text(2) for way in ("write", "read"))] for name in names]
    rival = FIO if FIO in names else LOOP

    def against(way: str, name: str) -> report.Summary:
        return report.ratio(times[f"{way}, {name}"], times[f"{way}, {rival}"])

    reaches = [
        report.Reach(f"time to {way} of {name} over that of {rival}", against(way, name), LIMIT)
        for way in ("write", "read")
        for name in ENGINES
    ]
    return report.Result(
        recipe="io",
        title="GiB per second to and from a file, past the page cache",
        settings={"MiB": args.mebibytes, "block KiB": args.block_kib, "depth": args.depth, "rounds": args.rounds},
        rounds=times,
        unit="ms per file",
        table=report.table(["arm", "write", "read"], rows),
        reaches=reaches,
        notes=[] if rival == FIO else ["fio is not installed: compared with the loop, which is a weaker rival"],
        bystanders=share,
    )


def _rate(times: list[float], args: argparse.Namespace) -> report.Summary:
    """GiB per second."""
    return report.summarize([args.mebibytes / 1.024 / ms for ms in times])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files are made")
    parser.add_argument("--mebibytes", type=int, default=512, help="size of each file (default: 512)")
    parser.add_argument("--block-kib", type=int, default=1024, help="block (default: 1024)")
    parser.add_argument("--depth", type=int, default=32, help="blocks under way (default: 32)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    parser.add_argument(
        "--save", action="store_true", help="keep the result in benches/results (on a quiet machine only)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        arms = make_arms(Path(folder), args)
        bystanders = Bystanders([])
        times = measure(arms, args.rounds)
        result(times, args, bystanders.share()).finish(args.json, save=args.save)


if __name__ == "__main__":
    main()
