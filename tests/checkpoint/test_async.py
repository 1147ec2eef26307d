"""Saves in the background: what is saved is the moment of the call, and failures surface in the next call."""

from __future__ import annotations

import copy
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shardcore as sc
from checkpoint.trainings import Setting, begin, look
from shardcore import _core
from shardcore.checkpoint.writing import Job
from shardcore.errors import StateError, StorageError
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


@contextmanager
def slow_copies(seconds: float = 0.2) -> Iterator[None]:
    """Whoever does not wait for a copy is there before it."""
    real = Job.copy

    def copy(job: Job) -> None:
        time.sleep(seconds)
        real(job)

    Job.copy = copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        Job.copy = real  # type: ignore[method-assign]


class WritesInForward(nn.Module):
    """Its forward writes to a weight and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.still = nn.Linear(5, 5).requires_grad_(False)
        self.second = nn.Linear(5, 3)
        self.register_buffer("count", torch.zeros(2))
        self.limit = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-self.limit, self.limit)
            self.count += 1
        return self.second(self.still(torch.tanh(self.first(x)))).float().square().mean()


class Edited:
    """A training, and everything that may be done to it between a save and the next step."""

    def __init__(self, stage: int, precision: str | None, home: str | None, folder: str) -> None:
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        disk = sc.Offload(states="nvme", params="nvme" if stage == 3 else None, path=folder)
        self.offload = disk if home == "disk" else sc.Offload(states="cpu") if home == "host" else None
        self.model = sc.shard(
            WritesInForward(), sc.Mesh(device="cpu"), stage=stage, precision=precision, offload=self.offload, units=()
        )
        self.optimizer = sc.optimizer("adamw", self.model, lr=1e-2)
        self.step()
        self.other_state = copy.deepcopy(self.optimizer.state_dict())
        self.other_weights = {name: value + 1 for name, value in sc.state_dict(self.model, rank0_only=False).items()}
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 6, dtype=self.dtype)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clamp_in_forward(self) -> None:
        self.model.limit = 0.01
        with torch.no_grad():
            self.model(torch.ones(2, 6, dtype=self.dtype))

    def clamp_around_backward(self) -> None:
        self.model.limit = 0.005
        self.model(torch.ones(2, 6, dtype=self.dtype)).backward()

    def write_plainly(self) -> None:
        if self.model.__dict__["_shardcore_root"].policy.stage == 3:
            with pytest.raises(StateError, match="summon"), torch.no_grad():
                self.model.first.bias.fill_(7.0)
            return
        with torch.no_grad():
            for param in self.model.parameters():
                param.fill_(7.0)
        sc.zero.local_master(self.model.first.weight)  # masters take the edits

    def summon(self) -> None:
        with sc.summon(self.model, writeback=True), torch.no_grad():
            for param in self.model.parameters():
                param.fill_(9.0)

    def load_weights(self) -> None:
        self.model.load_state_dict(self.other_weights)

    def load_whole_weights(self) -> None:
        sc.load_state_dict(self.model, {name: value + 2 for name, value in self.other_weights.items()})

    def load_states(self) -> None:
        self.optimizer.load_state_dict(self.other_state)

    def write_to_states(self) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                value.fill_(5.0)

    def set_values(self) -> None:
        param = self.model.second.weight
        sc.zero.set_full_master(param, torch.full(param.shape, 3.0))
        sc.optim.set_full_state(param, "exp_avg", torch.full(param.shape, 2.0))

    def offload_states(self) -> None:
        if self.offload is None:
            sc.zero.offload_states(self.model)
            sc.zero.reload_states(self.model)

    def move(self) -> None:
        with pytest.raises(StateError, match=r"replaced|moved"):
            self.model.to(torch.float64)

    def update(self) -> None:
        self.step()


CHANGES: list[Callable[[Edited], None]] = [
    Edited.clamp_in_forward, Edited.clamp_around_backward, Edited.write_plainly, Edited.summon, Edited.load_weights,
    Edited.load_whole_weights, Edited.write_to_states, Edited.set_values, Edited.load_states, Edited.offload_states,
    Edited.move, Edited.update,
]  # fmt: skip


def change_during_a_save(stage: int, precision: str | None, home: str | None, folder: str) -> None:
    """What is saved in the background is what a save in the foreground has just written."""
    edited = Edited(stage, precision, home, folder)
    for change in CHANGES:
        run = Path(folder, change.__name__)
        sc.checkpoint.save(run, edited.model, edited.optimizer, tag="before")
        with slow_copies():
            sc.checkpoint.save(run, edited.model, edited.optimizer, tag="during", async_=True)
            change(edited)
            sc.checkpoint.wait(edited.model)
        assert sc.checkpoint.diff(run / "before", run / "during") == [], change.__name__


@pytest.mark.parametrize(
    ("stage", "precision", "home"),
    [
        (0, None, None),
        (1, "bf16", None),
        (2, None, None),
        (2, None, "host"),
        (3, None, None),
        (3, "bf16", None),
        (3, "bf16", "disk"),
        (1, "bf16", "disk"),
    ],
)
def test_whatever_is_done_to_it_what_is_saved_was_there_at_the_call(
    stage: int, precision: str | None, home: str | None, tmp_path: Path
) -> None:
    run_spmd(change_during_a_save, 2, stage, precision, home, str(tmp_path), timeout=110)


@spmd(world=1)
def test_one_optimizer_of_two_models_waits_for_the_save_of_either(tmp_path: Path) -> None:
    models = [sc.shard(nn.Linear(4, 3), stage=2), sc.shard(nn.Sequential(nn.Linear(4, 3)), stage=2)]
    optimizer = sc.optimizer("adamw", models, lr=1e-2)
    sum(model(torch.ones(4)).sum() for model in models).backward()
    optimizer.step()
    sc.checkpoint.save(tmp_path, models[0], optimizer, tag="before")
    with slow_copies():
        sc.checkpoint.save(tmp_path, models[0], optimizer, tag="during", async_=True)
        sc.optim.set_full_state(models[1][0].weight, "exp_avg", torch.full((3, 4), 2.0))
        sc.checkpoint.wait(models[0])
    assert sc.checkpoint.diff(tmp_path / "before", tmp_path / "during") == []


@spmd(world=2)
def test_a_save_of_another_model_waits_for_the_one_under_way_in_its_folder(tmp_path: Path) -> None:
    first, second = (begin(Setting(model="mlp", stage=3)) for _ in range(2))
    with slow_copies():
        first.save(tmp_path, async_=True, tag="first")
        second.save(tmp_path, tag="second")
    sc.checkpoint.wait(first.model)
    assert [tag for tag, *_ in _core.list_checkpoints(tmp_path)] == ["first", "second"]
    assert sc.checkpoint.verify(tmp_path) == []


@spmd(world=1)
def test_a_wait_that_is_interrupted_is_not_forgotten(tmp_path: Path) -> None:
    training = begin(Setting(model="mlp", stage=2))
    training.save(tmp_path, tag="before")
    root = training.model.__dict__["_shardcore_root"]

    def interrupted() -> None:
        root.before_changes.pop(0)
        raise KeyboardInterrupt

    with slow_copies():
        training.save(tmp_path, tag="during", async_=True)
        waits = list(root.before_changes)
        root.before_changes.insert(0, interrupted)
        with pytest.raises(KeyboardInterrupt):
            root.about_to_change()
        assert root.before_changes == waits
        training.step(0)
    sc.checkpoint.wait(training.model)
    assert sc.checkpoint.diff(tmp_path / "before", tmp_path / "during") == []


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
