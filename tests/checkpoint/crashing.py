"""Saves that are killed: a warm process forks the ranks of a job, kills some, and has what is left loaded.

    python crashing.py FOLDER TRIALS SEED

prints one line a trial: what was killed when, and the step that was loaded afterwards. Exit status 1 if something that
was complete did not load.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardcore as sc

WORLD = 2


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a child; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001  # the child ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
    return 0


def training(rank: int, world: int, store: Path) -> tuple[nn.Module, sc.optim.ShardedOptimizer]:
    """A sharded model whose weights are all equal to the number of steps."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for param in model.parameters():
        nn.init.zeros_(param)
    sc.shard(model, sc.Mesh(device="cpu"), stage=3)
    return model, sc.optimizer("sgd", model, lr=1.0, momentum=0.0)


def save_for_ever(rank: int, folder: Path, store: Path, told: int) -> None:
    """Save after every step, and say so through a pipe once the first checkpoint is complete."""
    model, optimizer = training(rank, WORLD, store)
    for step in range(10_000):
        with sc.summon(model, writeback=True), torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        # The same tag again from time to time.
        sc.checkpoint.save(folder, model, optimizer, client_state={"step": step}, tag=f"step{step % 7}", keep_last=3)
        if step == 0:
            os.write(told, b"x")


def load_what_is_left(folder: Path, result: Path) -> None:
    """On one rank: the checkpoint that is found is whole, and training goes on from it."""
    model, optimizer = training(0, 1, folder)
    loaded = sc.checkpoint.load(folder, model, optimizer)
    step = loaded["step"]
    for name, value in sc.state_dict(model).items():
        if not bool((value == step).all()):
            raise AssertionError(f"{name} is not that of step {step}")
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    sc.checkpoint.save(folder, model, optimizer, client_state={"step": step + 1}, tag="after")
    result.write_text(str(step))


def trial(folder: Path, chance: random.Random) -> str:
    """Save, kill, load. Returns what happened."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run, store = folder / "run", folder / "store"
    reader, writer = os.pipe()
    ranks = [forked(lambda rank=rank: save_for_ever(rank, run, store, writer)) for rank in range(WORLD)]  # type: ignore[misc]
    os.read(reader, WORLD)
    delay = chance.uniform(0.0, 0.25)
    time.sleep(delay)
    victims = chance.choice([ranks, ranks[:1], ranks[1:]])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.02)
    left = sorted(path.name for path in run.iterdir())
    for pid in ranks:  # a survivor would only report that the other one is gone
        if pid not in victims:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    result = folder / "result"
    checker = forked(lambda: load_what_is_left(run, result))
    _, status = os.waitpid(checker, 0)
    step = result.read_text() if status == 0 else "NOTHING"
    return f"killed {len(victims)} after {delay:.3f} s; left {', '.join(left)}; loaded step {step}"


def main() -> int:
    """Run the trials."""
    _ = sc.checkpoint, sc.optimizer, sc.shard, sc.Mesh  # imported once, before the forks
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    failed = 0
    for _ in range(count):
        line = trial(folder, chance)
        failed += "NOTHING" in line
        print(line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
