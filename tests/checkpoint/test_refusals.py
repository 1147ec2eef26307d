"""What goes wrong is told on every rank, with the place; and nothing that was good is lost."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from checkpoint.trainings import Setting, WithLoss, begin, look
from offload.disks import mounted
from shardcore.errors import CheckpointError, ConfigError, RankMismatchError, StateError, StorageError
from shardcore.testing import SpmdError, run_spmd, spmd, zoo

MLP = Setting(model="mlp", stage=3)


def assert_loads(path: Path | str, step: int) -> None:
    """The checkpoint of that step loads, and training goes on. Collective."""
    training = begin(MLP, seed=4)
    training.load(path)
    assert training.optimizer.num_steps == step
    training.step(step)


@spmd(world=2)
def test_one_rank_whose_disk_refuses_fails_all_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    training = begin(MLP)
    training.steps(0, 1)
    training.save(tmp_path)
    training.steps(1, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if training.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(StorageError, match=r"saving-step2.*ulimit|rank 1 failed") as raised:
            training.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if training.mesh.rank == 1:
        assert raised.value.errno == errno.EFBIG
    if training.mesh.rank == 0:  # which has removed it
        assert not list(tmp_path.glob(".saving-*"))
    assert_loads(tmp_path, 1)
    training.save(tmp_path)
    assert_loads(tmp_path, 2)


def fill_the_disk(folder: str) -> list[str]:
    training = begin(Setting(model="tiny_gpt", stage=2))
    training.steps(0, 1)
    training.save(folder, tag="good")
    messages = []
    for number in range(20):
        try:
            training.save(folder, tag=f"more{number}")
        except StorageError as error:
            messages.append(str(error))
            break
    again = begin(Setting(model="tiny_gpt", stage=2), seed=1)
    again.load(folder)
    again.step(1)
    return [*messages, *(tag for tag, _, number, _ in sc.checkpoint.list_checkpoints(folder) if number is not None)]


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_g7_a_full_disk_is_told_with_the_sum_on_every_rank(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path / "disk", 4) as folder:
        for found in run_spmd(fill_the_disk, 2, str(folder / "run")):
            assert any("missing" in text or "No space left" in text for text in found[:1]), found
            assert "good" in found


@spmd(world=2)
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    training = begin(MLP)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        training.save(tmp_path / "file" / "run")
    training.save(tmp_path)


def save_as_nobody(folder: str) -> str:
    training = begin(MLP)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        with pytest.raises(StorageError) as raised:
            training.save(folder)
    finally:
        os.seteuid(0)
        os.setegid(0)
    assert_loads(folder, 0)
    return str(raised.value)


def test_a_read_only_folder_is_named() -> None:
    if os.getuid() != 0:
        pytest.skip("only root may give its rights up and take them back")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run_spmd(_save_first, 2, folder)
        for message in run_spmd(save_as_nobody, 2, folder):
            assert folder in message
            assert "Permission denied" in message


def _save_first(folder: str) -> None:
    begin(MLP).save(folder)


@spmd(world=2)
def test_g9_different_tags_or_paths_are_refused_on_all_ranks(tmp_path: Path) -> None:
    training = begin(MLP)
    rank = training.mesh.rank
    with pytest.raises(RankMismatchError, match="rank 1"):
        training.save(tmp_path, tag=f"mine{rank}")
    with pytest.raises(RankMismatchError, match="where and how to save"):
        training.save(tmp_path / str(rank))
    assert not list(tmp_path.iterdir())
    training.save(tmp_path, tag="a")
    training.save(tmp_path, tag="b")
    with pytest.raises(RankMismatchError, match="different checkpoints"):
        training.load(tmp_path, tag="ab"[rank])
    with pytest.raises(CheckpointError, match="nowhere"):
        training.load(tmp_path if rank == 0 else tmp_path / "nowhere")


def save_on_the_first_alone(folder: str) -> None:
    training = begin(MLP)
    if training.mesh.rank == 0:
        training.save(folder)
    time.sleep(1)


def test_g8_a_save_on_one_rank_alone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpmdError, match=r"where and how to save.*no answer within 4 s\. Ranks \[1\] never came"):
        run_spmd(within_seconds, 2, save_on_the_first_alone, str(tmp_path))
    assert not list(tmp_path.iterdir())


def within_seconds(function: Any, *arguments: Any) -> None:
    """Call the function with a short time-out of collectives."""
    os.environ["SHARDCORE_TIMEOUT"] = "4"
    try:
        function(*arguments)
    finally:
        del os.environ["SHARDCORE_TIMEOUT"]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (torch.ones(3), "tolist"),
        ({"a": [object()]}, r"client_state\['a'\]\[0\] is a object"),
        (b"raw", "hex"),
        ({1, 2}, "sorted"),
        (len, "no code"),
        (nn.Linear(1, 1), "state_dict"),
    ],
)
@spmd(world=1)
def test_g15_client_state_is_plain_values(value: Any, hint: str, tmp_path: Path) -> None:
    training = begin(MLP)
    with pytest.raises(CheckpointError, match=hint):
        training.save(tmp_path, client_state=value)
    assert not list(tmp_path.glob("step*"))


@spmd(world=1)
def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    training = begin(MLP)
    state = {"a": (1, 2.5, None), 3: [True, "x"], "big": 2**200, "inf": float("-inf"), "$x": {"$tuple": [1]}, "é": {}}
    training.save(tmp_path, client_state=state)
    loaded = training.load(tmp_path)
    assert dict(loaded) == state
    assert isinstance(loaded["a"], tuple)


@spmd(world=2)
def test_g7_damage_is_located_and_an_earlier_checkpoint_still_loads(tmp_path: Path) -> None:
    training = begin(MLP)
    training.save(tmp_path)
    training.steps(0, 1)
    path = training.save(tmp_path)
    if training.mesh.rank == 0:
        file = path / "rank-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(bytes(content))
        (damage,) = sc.checkpoint.verify(path)
        assert damage.path == file
        assert damage.start <= len(content) - 5 < damage.stop
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors are damaged"):
        training.load(tmp_path)
    assert_loads(tmp_path / "step0", 0)


class Renamed(nn.Module):
    """The zoo's perceptron with one layer less, and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.build("mlp", seed=5)
        last = list(dict(self.net.named_children()))[-1]
        self.extra = self.net.get_submodule(last)
        self.net.add_module(last, nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.net(x))


class Inside(nn.Module):
    """What makes the names of both agree."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@spmd(world=2)
def test_g6_names_on_one_side_only(tmp_path: Path) -> None:
    first = begin(MLP, model=Inside(zoo.build("mlp")))
    first.steps(0, 2)
    first.save(tmp_path)
    other = begin(MLP, model=Renamed())
    saved, before = (sc.state_dict(each.model, rank0_only=False) for each in (first, other))
    new, gone = sorted(before.keys() - saved.keys()), sorted(saved.keys() - before.keys())
    assert len(new) == len(gone) == 2
    with pytest.raises(CheckpointError) as raised:
        other.load(tmp_path)
    assert all(name in str(raised.value) for name in (*new, *gone))
    report = other.load(tmp_path, strict=False).report
    assert (sorted(report.missing), sorted(report.unexpected), sorted(report.without_state)) == (new, gone, new)
    for name, value in sc.state_dict(other.model, rank0_only=False).items():
        assert torch.equal(value, before[name] if name in new else saved[name]), name
    other.step(0)


@spmd(world=2)
def test_weights_alone_refresh_the_masters(tmp_path: Path) -> None:
    first = begin(Setting(model="mlp", stage=3, precision="bf16"))
    first.steps(0, 2)
    first.save(tmp_path)
    second = begin(Setting(model="mlp", stage=2, precision="bf16"), seed=1)
    sc.checkpoint.load(tmp_path, second.model)
    masters = {p[1:4]: p[4] for p in look(first)["pieces"] if p[0] == "weight"}
    for state, name, start, stop, values in look(second)["pieces"]:
        if state == "weight":
            assert torch.equal(values, masters[name, start, stop])
    assert second.optimizer.num_steps == 0


@spmd(world=2)
def test_g20_states_that_are_not_there_are_an_error_unless_asked(tmp_path: Path) -> None:
    first = begin(MLP)
    first.steps(0, 2)
    sc.checkpoint.save(tmp_path, first.model)
    second = begin(MLP, seed=1)
    with pytest.raises(CheckpointError, match="without optimizer state"):
        second.load(tmp_path)
    report = second.load(tmp_path, strict=False).report
    assert len(report.without_state) == len(list(second.model.parameters()))
    assert "without an optimizer" in report.explain()
    other = begin(Setting(model="mlp", optimizer="sgd"))
    first.save(tmp_path, tag="adam")
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        other.load(tmp_path, tag="adam")


@spmd(world=1)
def test_wrong_moments_are_refused(tmp_path: Path) -> None:
    training = begin(MLP)
    with sc.summon(training.model), pytest.raises(StateError, match="summon"):
        training.save(tmp_path)
    with pytest.raises(ConfigError, match="not sharded"):
        sc.checkpoint.save(tmp_path, nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        training.load(tmp_path)
    with pytest.raises(CheckpointError, match="slash"):
        training.save(tmp_path, tag="a/b")


@spmd(world=2)
def test_keep_last(tmp_path: Path) -> None:
    training = begin(MLP)
    for step in range(5):
        training.save(tmp_path, keep_last=2, keep_every=2)
        training.step(step)
    kept = [tag for tag, *_ in sc.checkpoint.list_checkpoints(tmp_path)]
    assert kept == ["step1", "step3", "step4"]
    assert (tmp_path / "latest").read_text() == "step4"


@spmd(world=1)
def test_every_optimizer_group_is_matched_by_its_parameters(tmp_path: Path) -> None:
    def build(order: list[int], weight_decay: float) -> tuple[nn.Module, Any]:
        model = sc.shard(WithLoss(zoo.build("mlp")), stage=2)
        params = list(model.parameters())
        groups = [{"params": params[:3], "weight_decay": 0.3}, {"params": params[3:], "weight_decay": weight_decay}]
        return model, sc.optimizer("adamw", [groups[i] for i in order], lr=0.1)

    model, optimizer = build([0, 1], 0.5)
    optimizer.param_groups[1]["lr"] = 0.7
    sc.checkpoint.save(tmp_path, model, optimizer)
    model, optimizer = build([1, 0], 0.0)
    report = sc.checkpoint.load(tmp_path, model, optimizer).report
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.3]
    assert report.groups_kept == []
    model = sc.shard(WithLoss(zoo.build("mlp")), stage=2)
    merged = sc.optimizer("adamw", model, lr=0.2)
    assert sc.checkpoint.load(tmp_path, model, merged).report.groups_kept == [0]
    assert merged.param_groups[0]["lr"] == 0.2
