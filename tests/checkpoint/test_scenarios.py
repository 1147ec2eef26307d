"""What checkpoints of other programs get wrong, one test for each scenario (pipelines: ``test_stages.py``)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from checkpoint.trainings import Setting, Training, WithLoss, assert_same, begin, index_of, look
from shardcore.errors import CheckpointError
from shardcore.testing import run_spmd, spmd, zoo
from shardcore.testing.twin import assert_bitwise

Seen = tuple[dict[str, Any], list[float]]


class Uneven(nn.Module):
    """Sizes 7, 1 and 13, a head tied to the embedding, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 13)
        self.still = nn.Linear(13, 13).requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(1))
        self.odd = nn.Linear(13, 7)
        self.back = nn.Linear(7, 13)
        self.head = nn.Linear(13, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.still(self.embed(x)) * self.factor
        return self.head(x + self.back(torch.tanh(self.odd(x))))


def tokens(step: int, rank: int, world: int) -> zoo.Batch:
    """This rank's rows of a batch of 12."""
    whole = torch.randint(7, (12,), generator=torch.Generator().manual_seed(step))
    return {"x": whole.chunk(world)[rank], "target": ((whole + 1) % 7).chunk(world)[rank]}


def uneven(setting: Setting, seed: int) -> Training:
    torch.manual_seed(seed)
    return begin(setting, model=Uneven())


def steps(training: Training, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = training.model(tokens(step, training.mesh.data_rank, training.mesh.data_world))
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def save_uneven(setting: Setting, folder: str) -> Seen:
    training = uneven(setting, seed=0)
    steps(training, 0, 3)
    training.save(folder)
    return look(training), steps(training, 3, 6)


def load_uneven(setting: Setting, folder: str) -> Seen:
    training = uneven(setting, seed=1)
    training.load(folder)
    return look(training), steps(training, 3, 6)


def mean(ranks: list[Seen]) -> list[float]:
    return [sum(each) / len(ranks) for each in zip(*(losses for _, losses in ranks), strict=True)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("saved", "loaded"), [(4, [1, 2, 3]), (1, [4]), (3, [4])])
def test_g1_resume_at_another_world_size(stage: int, saved: int, loaded: list[int], tmp_path: Path) -> None:
    before = run_spmd(save_uneven, saved, Setting(stage=stage, world=saved), str(tmp_path))
    for world in loaded:
        after = run_spmd(load_uneven, world, Setting(stage=stage, world=world), str(tmp_path))
        assert_same([seen for seen, _ in before], [seen for seen, _ in after])
        assert mean(after) == pytest.approx(mean(before), rel=1e-5)


class Pair(nn.Module):
    """One parameter of two elements, so that most ranks of four hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :2] * self.weight).sum(1, keepdim=True)


def pair(with_empty_group: bool, rate: float) -> tuple[nn.Module, Any]:
    model = sc.shard(Pair(), sc.Mesh(device="cpu"), stage=3)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "betas": (0.5, 0.6)}]
    if with_empty_group:
        groups.append({"params": [], "lr": rate / 2, "weight_decay": 0.7})
    return model, sc.optimizer("adamw", groups, lr=rate)


def save_pair(folder: str, with_empty_group: bool) -> list[float]:
    model, optimizer = pair(with_empty_group, 0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    sc.checkpoint.save(folder, model, optimizer)
    return sc.state_dict(model, rank0_only=False)["weight"].tolist()


def load_pair(folder: str, with_empty_group: bool) -> tuple[list[float], list[dict[str, Any]]]:
    model, optimizer = pair(with_empty_group, 0.3)
    sc.checkpoint.load(folder, model, optimizer)
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return sc.state_dict(model, rank0_only=False)["weight"].tolist(), options


@pytest.mark.parametrize("world", [4, 3, 1])
def test_g19_ranks_that_hold_only_padding(world: int, tmp_path: Path) -> None:
    saved = run_spmd(save_pair, 4, str(tmp_path), False)
    assert {tuple(value) for value, _ in run_spmd(load_pair, world, str(tmp_path), False)} == {tuple(saved[0])}


@pytest.mark.parametrize("world", [4, 2])
def test_g25_ranks_without_a_shard_and_an_empty_group_keep_all_options(world: int, tmp_path: Path) -> None:
    run_spmd(save_pair, 4, str(tmp_path), True)
    for _, (first, second) in run_spmd(load_pair, world, str(tmp_path), True):
        assert (first["lr"], first["betas"]) == (0.1, (0.5, 0.6))
        assert (second["lr"], second["weight_decay"], second["betas"]) == (0.05, 0.7, (0.9, 0.999))
        assert first.keys() == second.keys()


def test_g20_twelve_files_come_back_in_their_order_and_the_step_with_them(tmp_path: Path) -> None:
    setting = Setting(model="tiny_gpt", stage=3, world=2)
    before = run_spmd(save_after, 2, setting, str(tmp_path / "run"))
    folder = sc.checkpoint.reshard(tmp_path / "run", tmp_path / "twelve", 12)
    assert len(list(folder.glob("*.safetensors"))) == 12
    after = run_spmd(load_after, 2, setting, str(tmp_path / "twelve"))
    assert_same(before, after)
    assert {seen["steps"] for seen in after} == {(3, 0)}


def save_after(setting: Setting, folder: str) -> dict[str, Any]:
    training = begin(setting, folder)
    training.steps(0, 3)
    training.save(folder)
    return look(training)


def load_after(setting: Setting, folder: str) -> dict[str, Any]:
    training = begin(setting, folder, seed=1)
    training.load(folder)
    return look(training)


@spmd(world=2)
def test_g22_every_stage_loads_into_every_stage(tmp_path: Path) -> None:
    seen = {}
    for stage in range(4):
        training = begin(Setting(model="odd", stage=stage))
        training.steps(0, 2)
        training.save(tmp_path / str(stage))
        seen[stage] = gathered(look(training))
    for saved in range(4):
        for loaded in range(4):
            training = begin(Setting(model="odd", stage=loaded), seed=1)
            training.load(tmp_path / str(saved))
            assert_same(seen[saved], gathered(look(training)))


def gathered(mine: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


@spmd(world=4)
def test_g23_the_names_that_are_saved_are_those_of_the_model(tmp_path: Path) -> None:
    for stage in range(4):
        for name in ("tied", "frozen", "conv", "nested"):
            training = begin(Setting(model=name, stage=stage))
            path = training.save(tmp_path / name / str(stage))
            assert set(sc.checkpoint.open_weights(path)) == set(WithLoss(zoo.build(name)).state_dict())


@spmd(world=4, timeout=110)
def test_g24_the_folders_of_a_path_are_made_by_whoever_comes_first(tmp_path: Path) -> None:
    model = sc.shard(nn.Linear(3, 3), sc.Mesh(device="cpu"), stage=3)
    for number in range(50):
        path = sc.checkpoint.save(tmp_path / str(number) / "a" / "b", model)
        assert (path / "complete").exists()


def bits(training: Training, first: int, last: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = training.steps(first, last)
    return losses, sc.state_dict(training.model, rank0_only=False)


CELLS = [
    (stage, precision, home)
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
    for home in ("device", "host", "disk", "parameters")
    if home == "device" or stage >= (3 if home == "parameters" else 1)
]
FEW = {
    (0, "bf16", "device"), (1, "fp16", "host"), (2, "bf16", "disk"), (3, "fp16", "parameters"), (3, "fp32", "disk"),
    (1, "bf16", "device"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "precision", "home"),
    [cell if cell in FEW else pytest.param(*cell, marks=pytest.mark.full) for cell in CELLS],
)
@spmd(world=2)
def test_g27_the_next_steps_are_the_same_to_the_last_bit(stage: int, precision: str, home: str, tmp_path: Path) -> None:
    setting = Setting(model="tiny_gpt", stage=stage, precision=precision, home=home)
    first = begin(setting, tmp_path / "first")
    first.steps(0, 2)
    first.save(tmp_path / "run")
    second = begin(setting, tmp_path / "second", seed=3)
    second.load(tmp_path / "run")
    losses, weights = bits(first, 2, 5)
    again, same = bits(second, 2, 5)
    assert again == losses
    assert_bitwise(same, weights)


@spmd(world=4)
def test_g28_disks_of_single_nodes_are_told_on_all_ranks(tmp_path: Path) -> None:
    training = begin(Setting(model="mlp", stage=3))
    node = tmp_path / f"node{training.mesh.rank // 2}"
    node.mkdir(exist_ok=True)
    training.save(tmp_path / "node0" / "good")
    before, here = Path.cwd(), Path("/proc/self/cwd")  # one path, and another folder on each node
    os.chdir(node)
    try:
        with pytest.raises(CheckpointError, match="file system that all ranks share"):
            training.save(here / "run")
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            training.load(here / "good")
    finally:
        os.chdir(before)
    training.load(tmp_path / "node0" / "good")


class Ordered(nn.Module):
    """Two layers of the same shape, declared in one order or the other."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@spmd(world=2)
def test_g29_moments_follow_the_names_of_parameters(tmp_path: Path) -> None:
    model = WithLoss(Ordered("first", "second"))
    sc.shard(model, sc.Mesh(device="cpu"), stage=3)
    optimizer = sc.optimizer("adamw", model, lr=0.1)
    model({"x": torch.randn(3, 4), "target": torch.randn(3, 4)}).backward()
    optimizer.step()
    sc.checkpoint.save(tmp_path, model, optimizer)
    other = WithLoss(Ordered("second", "first"))
    sc.shard(other, sc.Mesh(device="cpu"), stage=1)
    again = sc.optimizer("adamw", other, lr=0.1)
    sc.checkpoint.load(tmp_path, other, again)
    for name in ("first", "second"):
        one, two = (getattr(each.model, name).weight for each in (model, other))
        for state in ("exp_avg", "exp_avg_sq"):
            moments = [sc.optim.full_state(param, state) for param in (one, two)]
            assert torch.equal(*moments), (name, state)
    first, second = (sc.optim.full_state(getattr(model.model, name).weight, "exp_avg") for name in ("first", "second"))
    assert not torch.equal(first, second), "a mistaken place would be seen"


@spmd(world=2)
def test_g30_every_way_of_saving_gives_a_model_that_loads(tmp_path: Path) -> None:
    training = begin(Setting(model="frozen", stage=3, precision="bf16"))
    training.steps(0, 1)
    modes: dict[str, dict[str, Any]] = {
        "all": {},
        "weights": {"optimizer": None, "scheduler": None},
        "trained": {"exclude_frozen": True},
        "aside": {"async_": True},
        "quiet": {"save_latest": False},
        "checked": {"read_back": True},
        "kept": {"keep_last": 1, "save_latest": False},
    }
    whole = sc.state_dict(training.model, rank0_only=False)
    for mode, options in modes.items():
        parts = {"optimizer": training.optimizer, "scheduler": training.scheduler, **options}
        path = sc.checkpoint.save(tmp_path / mode, training.model, tag="t", **parts)
        sc.checkpoint.wait(training.model)
        index = index_of(path)
        assert sum(file["nbytes"] for file in index["files"]) > 1000, mode
        assert sc.checkpoint.verify(path) == []
        other = begin(Setting(model="frozen", stage=2, precision="bf16"), seed=0 if mode == "trained" else 4)
        sc.checkpoint.load(path, other.model)
        assert_bitwise(sc.state_dict(other.model, rank0_only=False), whole)


@spmd(world=2)
def test_g31_one_file_says_which_is_the_latest_and_what_it_names_must_be_whole(tmp_path: Path) -> None:
    training = begin(Setting(model="mlp", stage=2))
    for step in range(2):
        training.save(tmp_path)
        training.step(step)
    files = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert files == ["latest"]
    assert training.load(tmp_path).report.path.name == "step1"
    torch.distributed.barrier()
    if training.mesh.rank == 0:
        (tmp_path / "step1" / "complete").unlink()
    torch.distributed.barrier()
    report = training.load(tmp_path).report
    assert report.path.name == "step0"
    assert any("step1" in note for note in report.notes)
    torch.distributed.barrier()
    if training.mesh.rank == 0:
        shutil.rmtree(tmp_path / "step1")
        (tmp_path / "latest").write_text("")
    torch.distributed.barrier()
    assert training.load(tmp_path).report.path.name == "step0"
    assert json.loads((tmp_path / "step0" / "index.json").read_text())["sequence"] == 1
