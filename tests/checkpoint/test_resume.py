"""On the same mesh a resumed training is the uninterrupted one, bit for bit: data order and random numbers included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardcore as sc
from checkpoint.trainings import Setting, WithLoss, begin, look
from shardcore.testing import run_spmd, spmd
from shardcore.testing.twin import assert_bitwise


class Dropped(nn.Module):
    """Dropout, and running statistics that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.norm(self.up(x)), 0.3))


class Loop:
    """A training over a shuffled dataset, with everything random that a training has."""

    def __init__(self, stage: int, home: str | None, folder: str, seed: int) -> None:
        self.mesh = sc.Mesh(device="cpu")
        torch.manual_seed(seed + self.mesh.rank)
        random.seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = WithLoss(Dropped())
        offload = sc.Offload(states=home, path=folder if home == "nvme" else None) if home else None
        sc.shard(self.model, self.mesh, stage=stage, offload=offload)
        self.optimizer = sc.optimizer("adamw", self.model, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=40)
        generator = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.randn(60, 6, generator=generator), torch.randn(60, 3, generator=generator))
        self.sampler = sc.data.sampler(data, self.mesh)
        # With a generator of its own: else every iterator that is made draws from torch's.
        own = torch.Generator()
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler, drop_last=True, generator=own)
        self.batches = iter(self.loader)

    def steps(self, count: int) -> list[float]:
        """Losses of this rank; Python's random numbers enter, too."""
        losses = []
        while len(losses) < count:
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                continue
            loss = self.model({"x": batch[0] + random.random(), "target": batch[1]})
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.sampler.advance(len(batch[0]))
            losses.append(float(loss.detach()))
        return losses

    def resume(self, path: str) -> None:
        """Load, and go on in the data where the save was."""
        sc.checkpoint.load(path, self.model, self.optimizer, self.scheduler, data=self.sampler)
        self.batches = iter(self.loader)


def uninterrupted(stage: int, home: str | None, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    loop = Loop(stage, home, folder, seed=0)
    loop.steps(5)
    sc.checkpoint.save(f"{folder}/run", loop.model, loop.optimizer, loop.scheduler, data=loop.sampler)
    return loop.steps(20), sc.state_dict(loop.model, rank0_only=False)


def resumed(stage: int, home: str | None, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    loop = Loop(stage, home, folder, seed=3)
    loop.steps(2)
    loop.resume(f"{folder}/run")
    return loop.steps(20), sc.state_dict(loop.model, rank0_only=False)


@pytest.mark.parametrize(
    ("stage", "home", "world"), [(0, None, 2), (1, None, 1), (2, "cpu", 2), (3, None, 3), (3, "nvme", 2)]
)
def test_twenty_steps_after_a_resume_are_those_of_no_interruption(
    stage: int, home: str | None, world: int, tmp_path: Any
) -> None:
    straight = run_spmd(uninterrupted, world, stage, home, str(tmp_path))
    again = run_spmd(resumed, world, stage, home, str(tmp_path))
    for (losses, weights), (others, same) in zip(straight, again, strict=True):
        assert others == losses
        assert_bitwise(same, weights)


@spmd(world=2)
def test_g11_the_schedule_goes_on_and_writes_to_the_groups_of_the_optimizer(tmp_path: Any) -> None:
    setting = Setting(model="mlp", stage=2)
    straight = begin(setting)
    rates = [straight.step(i) and straight.optimizer.param_groups[0]["lr"] for i in range(10)]
    first = begin(setting)
    first.steps(0, 5)
    first.save(tmp_path)
    second = begin(setting, seed=2)
    groups = second.optimizer.param_groups
    second.load(tmp_path)
    assert second.optimizer.param_groups is groups
    assert second.scheduler.optimizer is second.optimizer
    assert [second.step(i) and second.optimizer.param_groups[0]["lr"] for i in range(5, 10)] == rates[5:]


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_g12_the_step_of_adam_is_restored(stage: int, tmp_path: Any) -> None:
    straight = begin(Setting(model="odd", stage=stage))
    straight.steps(0, 5)
    straight.save(tmp_path)
    resumed = begin(Setting(model="odd", stage=stage), seed=1)
    resumed.load(tmp_path)
    steps = {value["step"] for value in look(resumed)["values"].values()}
    assert steps == ({5.0} if resumed.mesh.rank == 0 else set())  # the second rank's shard is padding
    straight.step(5)
    resumed.step(5)
    for mine, other in zip(look(resumed)["pieces"], look(straight)["pieces"], strict=True):
        assert mine[:4] == other[:4]
        assert torch.equal(mine[4], other[4])


@spmd(world=2)
def test_the_loss_scale_goes_on(tmp_path: Any) -> None:
    first = begin(Setting(model="mlp", stage=3, precision="fp16"))
    first.optimizer.loss_scale.scale, first.optimizer.loss_scale.clean_steps = 1024.0, 17
    first.steps(0, 2)
    first.save(tmp_path)
    second = begin(Setting(model="mlp", stage=1, precision="fp16"))
    second.load(tmp_path)
    assert second.optimizer.loss_scale.state_dict() == first.optimizer.loss_scale.state_dict()
    plain = begin(Setting(model="mlp", stage=1, precision="bf16"))
    report = plain.load(tmp_path).report
    assert plain.optimizer.loss_scale.scale == 1.0
    assert any("loss scale" in note for note in report.notes)
