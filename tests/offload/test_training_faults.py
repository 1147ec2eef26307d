"""Training with states outside the device where memory or the disk fails: an error with the reason."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch

import shardcore as sc
from offload.disks import mounted
from offload.given import names, python
from shardcore.errors import ConfigError, StateError, StorageError
from shardcore.testing import spmd
from zero.models import Vector

NUMEL = 1 << 20


def on_disk(folder: Path, numel: int = NUMEL) -> tuple[Vector, torch.optim.Optimizer]:
    """A model whose states, 12 bytes an element, are on a disk."""
    model = Vector(numel)
    offload = sc.Offload(states="nvme", path=folder, tile_numel=numel // 8, num_tiles=2)
    sc.shard(model, stage=2, offload=offload)
    return model, sc.optimizer(torch.optim.AdamW, model, lr=0.1)


def step(model: Vector, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, model.weight.numel())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@spmd(world=1)
def test_a_full_disk_shows_before_training(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", 10) as disk:
        with pytest.raises(StorageError, match=r"has room for \d+ bytes and 12582912 are needed there") as raised:
            on_disk(disk)
        assert raised.value.errno == errno.ENOSPC
        assert names(disk) == []


@spmd(world=1)
def test_a_read_only_disk_shows_before_training(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path / "small", 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StorageError, match="Read-only file system"):
            on_disk(disk)


@spmd(world=1)
def test_a_file_that_fails_ends_the_step_and_later_ones_refuse(tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path)
    step(model, optimizer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and ".swap" in str(link.readlink()):
            os.dup2(nothing, int(link.name))
    with pytest.raises(StorageError, match=r"shardcore-\d+") as raised:
        step(model, optimizer)
    assert ".swap" in str(raised.value.filename)
    with pytest.raises(StateError, match="partly updated: load a checkpoint"):
        optimizer.step()
    os.close(nothing)


@spmd(world=1)
def test_a_folder_that_is_removed_takes_nothing_away(tmp_path: Path) -> None:
    """The file has no name to lose."""
    folder = tmp_path / "disk"
    model, optimizer = on_disk(folder, 1024)
    step(model, optimizer)
    folder.rmdir()
    step(model, optimizer)
    alone = torch.zeros(1024, requires_grad=True)
    plain = torch.optim.AdamW([alone], lr=0.1)
    for _ in range(2):
        alone.grad = torch.ones(1024)
        plain.step()
    torch.testing.assert_close(model.weight.detach(), alone.detach())


def test_d3_a_killed_training_leaves_nothing_and_another_follows(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        import torch
        import shardcore as sc

        offload = sc.Offload(states="nvme", path=sys.argv[1], tile_numel=512)
        model = sc.shard(torch.nn.Linear(64, 64), stage=2, offload=offload)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("trained", flush=True)
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    for end, code in (("killed", -9), ("quietly", 0)):
        outcome = python(program, tmp_path, end, timeout=110)
        assert (outcome.stdout.strip(), outcome.returncode) == ("trained", code), outcome.stderr
        assert names(tmp_path) == []


@spmd(world=2)
def test_too_little_memory_shows_the_sum_on_every_rank() -> None:
    """The check comes before anything is taken."""
    numel = 1 << 44
    spec = sc.offload.ShardSpec(
        numel=numel, param=torch.bfloat16, master=torch.float32, grad=torch.float32, trainable=True
    )
    axis = sc.Mesh()["dp"]
    with pytest.raises(StorageError) as raised:
        sc.offload.place_shards(sc.Offload(states="cpu", grads="cpu"), [spec], torch.device("cpu"), axis)
    message = str(raised.value)
    sum_of = f"(master weights {4 * numel} + gradients {4 * numel} = {8 * numel} bytes)"
    assert f"2 ranks on this machine x {sum_of}" in message
    assert "available" in message
    assert "missing" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": "disk"}, r"states='disk'\): expected None or 'cpu' or 'nvme'"),
        ({"grads": "nvme", "states": "cpu"}, r"grads='nvme'\): expected None or 'cpu'"),
        ({"states": "nvme"}, r'states="nvme"\): give the folder'),
        ({"states": "cpu", "path": "/tmp"}, r"nothing rests on a disk"),
        ({"grads": "cpu"}, r'add states="cpu"'),
        ({"states": "cpu", "ratio": 1.5}, r"ratio=1\.5\): expected a number from 0 to 1"),
        ({"states": "nvme", "path": "/tmp", "ratio": 0.5}, r'a part is offloaded with states="cpu" only'),
        ({"states": "cpu", "tile_numel": 0}, r"tile_numel=0\): expected an integer of at least 1"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sc.Offload(**settings)


@spmd(world=1)
def test_what_a_stage_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="at stage 0 every rank would keep and update the whole states"):
        sc.shard(Vector(4), stage=0, offload=sc.Offload(states="cpu"))
    with pytest.raises(ConfigError, match="use stage 3"):
        sc.shard(Vector(4), stage=2, offload=sc.Offload(params="cpu"))
    with pytest.raises(ConfigError, match=r"expected shardcore\.Offload"):
        sc.shard(Vector(4), stage=2, offload="cpu")
    first, second = (sc.shard(Vector(4), stage=2, offload=sc.Offload(states=home)) for home in (None, "cpu"))
    with pytest.raises(ConfigError, match="different offload settings"):
        sc.optimizer(torch.optim.AdamW, [first, second], lr=0.1)
