"""Saves in the background: what is saved is the moment of the call, and failures surface in the next call."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardcore as sc
from checkpoint.trainings import Setting, begin, look
from shardcore import _core
from shardcore.errors import StorageError
from shardcore.protocols import find_root
from shardcore.testing import run_spmd, spmd


def save_and_go_on(setting: Setting, folder: str) -> tuple[list[float], float]:
    """Saves while it trains: a checkpoint after every second step."""
    training = begin(setting, folder)
    losses = []
    for step in range(6):
        if step % 2 == 0:
            training.save(f"{folder}/run", async_=True, tag=f"at{step}")
        losses.append(training.step(step))
    sc.checkpoint.wait(training.model)
    return losses, time.monotonic()


def go_on_from(setting: Setting, folder: str, step: int) -> list[float]:
    training = begin(setting, folder, seed=1)
    training.load(f"{folder}/run", tag=f"at{step}")
    assert training.optimizer.num_steps == step
    return training.steps(step, 6)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(model="conv", stage=2),
        Setting(model="tiny_gpt", stage=3, precision="bf16"),
        Setting(model="odd", stage=1, home="disk"),
        Setting(model="odd", stage=0, world=3),
    ],
    ids=lambda s: f"{s.model}-{s.stage}-{s.home}",
)
def test_what_is_saved_is_the_moment_of_the_call(setting: Setting, tmp_path: Path) -> None:
    straight = run_spmd(save_and_go_on, setting.world, setting, str(tmp_path))
    for step in (0, 2, 4):
        again = run_spmd(go_on_from, setting.world, setting, str(tmp_path), step)
        assert [losses[step:] for losses, _ in straight] == again
    assert sc.checkpoint.verify(tmp_path / "run") == []
    assert len(sc.checkpoint.list_checkpoints(tmp_path / "run")) == 3


@spmd(world=2)
def test_a_failure_surfaces_in_the_next_call_on_every_rank(tmp_path: Path) -> None:
    training = begin(Setting(model="mlp", stage=3))
    training.save(tmp_path)
    training.step(0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if training.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    training.save(tmp_path, async_=True)
    training.step(1)
    with pytest.raises((StorageError, sc.errors.CheckpointError), match="rank"):
        sc.checkpoint.wait(training.model)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [tag for tag, *_ in _core.list_checkpoints(tmp_path)] == ["step0"]
    sc.checkpoint.wait(training.model)
    training.save(tmp_path)
    training.load(tmp_path, tag="step2")


@spmd(world=2)
def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    training = begin(Setting(model="tiny_gpt", stage=2))
    training.save(tmp_path, async_=True, tag="a")
    training.save(tmp_path, tag="b")
    found = {tag: number for tag, _, number, _ in _core.list_checkpoints(tmp_path)}
    assert found == {"a": 1, "b": 2}


@spmd(world=1)
def test_edits_in_a_context_wait_for_the_copy(tmp_path: Path) -> None:
    training = begin(Setting(model="mlp", stage=3))
    before = {p[:4]: p[4] for p in look(training)["pieces"]}
    training.save(tmp_path, async_=True)
    with sc.summon(training.model, writeback=True), torch.no_grad():
        for param in training.model.parameters():
            param.fill_(9.0)
    training.load(tmp_path)
    for piece in look(training)["pieces"]:
        assert torch.equal(piece[4], before[piece[:4]])


class Clamped(nn.Linear):
    """A forward that writes to its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
@spmd(world=2)
def test_loading_waits_for_the_copy(stage: int) -> None:
    model = sc.shard(nn.Sequential(Clamped(4, 4), nn.Linear(4, 2)), sc.Mesh(), stage=stage)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    state, shapes = optimizer.state_dict(), sc.state_dict(model, rank0_only=False)
    acts = [
        lambda: model.load_state_dict({name: torch.ones(param.shape) for name, param in shapes.items()}),
        lambda: optimizer.load_state_dict(state),
        optimizer.state_dict,
    ]
    if stage == 3:  # below it the forward writes to what is being copied, as code by hand does
        acts.append(lambda: model(torch.ones(1, 4)))
    for act in acts:
        waited: list[int] = []
        find_root(model).before_changes.append(lambda waited=waited: waited.append(1))
        act()
        assert waited == [1]


def test_a_program_that_ends_after_a_failed_save_has_failed(tmp_path: Path) -> None:
    program = """
        import resource, sys
        import torch
        import shardcore as sc

        model = sc.shard(torch.nn.Linear(64, 64), stage=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        sc.checkpoint.save(sys.argv[1], model, async_=True)
        print("ended", flush=True)
    """
    code = "\n".join(line.removeprefix(" " * 8) for line in program.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.stdout == "ended\n"
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert str(tmp_path) in done.stderr
