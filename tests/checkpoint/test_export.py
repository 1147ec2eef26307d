"""Weights for others and from others, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import shardcore as sc
from checkpoint.trainings import Setting, WithLoss, begin
from shardcore import cli
from shardcore.errors import CheckpointError
from shardcore.testing import run_spmd, spmd, zoo


class TiedHead(nn.Module):
    """An embedding tied to the head, and three layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@spmd(world=2)
def test_g2_a_tied_weight_is_exported_under_all_its_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sc.shard(TiedHead(), stage=3)
    sc.checkpoint.save(tmp_path / "run", model)
    whole = sc.state_dict(model, rank0_only=False)
    if sc.Mesh().rank == 0:
        (file,) = sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "out")
        exported = load_file(file)
        assert sorted(exported) == sorted(whole)
        for name, value in whole.items():
            assert torch.equal(exported[name], value), name
        assert torch.equal(exported["head.weight"], exported["embed.weight"])


def save_frozen(stage: int, precision: str, folder: str) -> dict[str, torch.Tensor]:
    training = begin(Setting(model="frozen", stage=stage, precision=precision))
    training.steps(0, 1)
    training.save(folder)
    training.save(folder, tag="trained", exclude_frozen=True)
    before = sc.state_dict(training.model, rank0_only=False)
    training.load(folder, tag="trained")
    return before


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_g3_g4_frozen_parameters_are_exported_in_the_dtype_asked_for(
    stage: int, precision: str, tmp_path: Path
) -> None:
    whole, _ = run_spmd(save_frozen, 2, stage, precision, str(tmp_path / "run"))
    (file,) = sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "out", tag="step1")
    exported = load_file(file)
    assert sorted(exported) == sorted(whole)
    assert all(
        torch.equal(exported[name], value) and exported[name].dtype == value.dtype for name, value in whole.items()
    )
    (file,) = sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "fp32", tag="step1", dtype="fp32")
    assert {value.dtype for value in load_file(file).values() if value.is_floating_point()} == {torch.float32}
    frozen = [name for name, param in zoo.build("frozen").named_parameters() if not param.requires_grad]
    assert frozen
    (file,) = sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "trained", tag="step1", exclude_frozen=True)
    assert sorted(load_file(file)) == sorted(set(whole) - {f"model.{name}" for name in frozen})
    index = json.loads((tmp_path / "run" / "trained" / "index.json").read_text())
    kept = {tensor["name"] for tensor in index["tensors"] if tensor["role"] == "weight"}
    assert kept.isdisjoint({f"model.{name}" for name in frozen})


@spmd(world=2)
def test_files_of_a_bounded_size_come_back_on_another_stage(tmp_path: Path) -> None:
    first = begin(Setting(model="tiny_gpt", stage=3))
    first.save(tmp_path / "run")
    names = set(sc.state_dict(first.model, rank0_only=False))
    rank = first.mesh.rank
    if rank == 0:
        files = sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "out", max_shard_nbytes=40_000)
        assert len(files) > 3
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == names
        for file in files:
            with safe_open(file, "pt") as opened:
                numels = [opened.get_tensor(name).numel() for name in opened.keys()]  # noqa: SIM118
                assert sum(numels) * 4 <= 40_000 or len(numels) == 1
    torch.distributed.barrier()
    second = begin(Setting(model="tiny_gpt", stage=1), seed=3)
    sc.checkpoint.from_hf(tmp_path / "out", second.model)
    for name, value in sc.state_dict(second.model, rank0_only=False).items():
        assert torch.equal(value, sc.state_dict(first.model, rank0_only=False)[name]), name
    with pytest.raises(CheckpointError, match="holds an export already"):
        sc.checkpoint.to_hf(tmp_path / "run", tmp_path / "out")


@spmd(world=2)
def test_files_of_others_are_loaded_by_name(tmp_path: Path) -> None:
    source = zoo.build("conv", seed=4)
    if sc.Mesh().rank == 0:
        save_file({f"old.{k}": v for k, v in source.state_dict().items()}, tmp_path / "model.safetensors")
    torch.distributed.barrier()
    model = sc.shard(WithLoss(zoo.build("conv")), stage=3, precision="bf16")
    with pytest.raises(CheckpointError, match=r"missing in the files.*\n.*only in them"):
        sc.checkpoint.from_hf(tmp_path, model)
    report = sc.checkpoint.from_hf(tmp_path, model, rename=lambda name: name.replace("old.", "model."))
    assert report.missing == report.unexpected == []
    for name, value in sc.state_dict(model, rank0_only=False).items():
        assert torch.equal(value, source.state_dict()[name.removeprefix("model.")].to(value.dtype)), name


def peak_of_export(folder: str) -> None:
    """Exports in a process of its own, and prints by how much memory grew, in bytes."""
    code = (
        "import sys\n"
        "import shardcore as sc\n"
        "from shardcore.checkpoint import to_hf, verify\n"
        "def peak():  # of this memory; ru_maxrss would be at least what the parent had when it forked\n"
        "    status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "    return int(status['VmHWM'].split()[0]) * 1024\n"
        "verify(sys.argv[1] + '/run')\n"
        "before = peak()\n"
        "files = to_hf(sys.argv[1] + '/run', sys.argv[1] + '/out', max_shard_nbytes=60_000_000)\n"
        "assert len(files) == 4\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3 * 10_485_760 + (64 << 20), done.stdout


def test_g14_an_export_needs_little_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1619, 1619, bias=False) for _ in range(20)))  # 20 tensors of 10 MB
    sc.checkpoint.save(tmp_path / "run", sc.shard(model, stage=1))
    peak_of_export(str(tmp_path))


def test_g17_a_hundred_layers_keep_their_own_values(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(101)))
    for i, layer in enumerate(model):
        nn.init.constant_(layer.weight, i)
    sc.checkpoint.save(tmp_path / "run", sc.shard(model, stage=2))
    other = sc.shard(nn.Sequential(*(nn.Linear(1, 1) for _ in range(101))), stage=3)
    sc.checkpoint.load(tmp_path / "run", other)
    values = sc.state_dict(other)
    assert [float(values[f"{i}.weight"]) for i in range(101)] == list(range(101))


def run(*arguments: object) -> int:
    return cli.main(["ckpt", *(str(argument) for argument in arguments)])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = begin(Setting(model="mlp", stage=3, world=1))
    training.save(tmp_path / "run")
    training.step(0)
    training.save(tmp_path / "run")
    assert run("ls", tmp_path / "run") == 0
    assert "step1: number 2" in capsys.readouterr().out
    assert run("ls", tmp_path / "run" / "step1", "--tensors") == 0
    out = capsys.readouterr().out
    assert "AdamW, 1 steps" in out
    assert "state/exp_avg model." in out
    assert run("verify", tmp_path / "run") == 0
    assert run("diff", tmp_path / "run" / "step0", tmp_path / "run" / "step1") == 1
    assert "in the second only" in capsys.readouterr().out
    assert run("reshard", tmp_path / "run" / "step1", tmp_path / "copy", "--num-files", 3) == 0
    assert len(list((tmp_path / "copy" / "step1").glob("*.safetensors"))) == 3
    assert run("diff", tmp_path / "run" / "step1", tmp_path / "copy") == 0
    assert run("verify", tmp_path / "copy") == 0
    assert run("to-hf", tmp_path / "run", tmp_path / "out", "--strip", "model.") == 0
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == set(zoo.build("mlp").state_dict())
    file = tmp_path / "run" / "step1" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(bytes(content))
    capsys.readouterr()
    assert run("verify", tmp_path / "run") == 1
    assert f"{file}: bytes" in capsys.readouterr().out
    assert run("ls", tmp_path / "nothing" / "here") == 0
    assert run("verify", tmp_path / "nothing") == 1
    again = begin(Setting(model="mlp", stage=1), seed=1)
    again.load(tmp_path / "copy")
    assert again.optimizer.num_steps == 1


def test_looking_at_checkpoints_needs_no_torch(tmp_path: Path) -> None:
    begin(Setting(model="mlp", world=1)).save(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from shardcore.cli import main\n"
        f"sys.exit(main(['ckpt', 'ls', {str(tmp_path / 'step0')!r}]) + main(['ckpt', 'verify', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sound" in done.stdout
