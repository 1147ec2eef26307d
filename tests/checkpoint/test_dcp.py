"""Checkpoints for ``torch.distributed.checkpoint``, and from it."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardcore as sc
from checkpoint.trainings import OPTIMIZERS, Setting, Training, WithLoss, assert_same, begin, look
from shardcore import cli
from shardcore.errors import CheckpointError
from shardcore.testing import run_spmd, spmd, zoo

MODEL = "tiny_gpt"
OPTIONS = OPTIMIZERS["adamw"][1]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plain(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The training of ``begin(Setting(MODEL))`` in plain torch."""
    model = WithLoss(zoo.build(MODEL, seed))
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in named if not name.endswith("bias")]},
        {"params": [param for name, param in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, **OPTIONS)


def save(setting: Setting, folder: str) -> list[float]:
    """Train, save, and train on."""
    training = begin(setting)
    training.steps(0, 3)
    training.save(folder)
    return training.steps(3, 6)


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_torch_goes_on_where_an_export_was_saved(stage: int, tmp_path: Path) -> None:
    ranks = run_spmd(save, 2, Setting(model=MODEL, stage=stage), str(tmp_path / "run"))
    assert cli.main(["ckpt", "to-dcp", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model, optimizer = plain(seed=3)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    losses = []
    for step in range(3, 6):
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * (1 + math.cos(math.pi * step / 50)) / 2
        loss = model(zoo.batch(MODEL, step, 12))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    expected = [sum(each) / 2 for each in zip(*ranks, strict=True)]
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    with pytest.raises(CheckpointError, match="holds a checkpoint of DCP already"):
        sc.checkpoint.to_dcp(tmp_path / "run", tmp_path / "out")


def save_by_torch(folder: str) -> None:
    """A model of torch's own FSDP, saved by DCP on several ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model, _ = plain()
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)  # of the parameters that there are now
    for step in range(2):
        batch = zoo.rank_slice(zoo.batch(MODEL, step, 12), mesh.get_rank(), mesh.size())
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)


def load_imported(folder: str) -> dict[str, Any]:
    """Into another number of ranks."""
    training = begin(Setting(model=MODEL, stage=3), seed=5)
    sc.checkpoint.load(folder, training.model, training.optimizer)
    assert training.optimizer.num_steps == 2
    return look(training)


def test_what_fsdp_saved_on_three_ranks_loads_on_two(tmp_path: Path) -> None:
    run_spmd(save_by_torch, 3, str(tmp_path / "theirs"))
    assert cli.main(["ckpt", "import-dcp", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    ranks = run_spmd(load_imported, 2, str(tmp_path / "run"))
    model, optimizer = plain(seed=1)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found: dict[tuple[str, str], torch.Tensor] = {}
    for rank in ranks:
        for state, name, start, stop, values in rank["pieces"]:
            whole = found.setdefault((state, name), torch.full_like(states["model"][name].reshape(-1), float("nan")))
            whole[start:stop] = values
    for (state, name), values in found.items():
        expected = states["model"][name] if state in ("own", "weight") else states["optim"]["state"][name][state]
        assert torch.equal(values.view(expected.shape), expected), (state, name)
    assert {"own", "weight", "exp_avg", "exp_avg_sq"} == {state for state, _ in found}


@spmd(world=2)
def test_there_and_back_changes_nothing(tmp_path: Path) -> None:
    first = begin(Setting(model=MODEL, stage=2))
    first.steps(0, 2)
    first.save(tmp_path / "run")
    if first.mesh.rank == 0:
        sc.checkpoint.to_dcp(tmp_path / "run", tmp_path / "dcp", model_key="net", optimizer_key="adam")
        keys = {"model_key": "net", "optimizer_key": "adam"}
        sc.checkpoint.import_dcp(tmp_path / "dcp", tmp_path / "back", **keys, num_files=3)
    torch.distributed.barrier()
    second: Training = begin(Setting(model=MODEL, stage=3), seed=4)
    sc.checkpoint.load(tmp_path / "back", second.model, second.optimizer)
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    everywhere = [[None] * 2, [None] * 2]
    for both, training in zip(everywhere, (first, second), strict=True):
        torch.distributed.all_gather_object(both, look(training))
    assert_same(*everywhere)  # type: ignore[arg-type]


def test_what_is_no_checkpoint_of_dcp_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        sc.checkpoint.import_dcp(tmp_path, tmp_path / "out")
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match="is not as DCP writes it"):
        sc.checkpoint.import_dcp(tmp_path, tmp_path / "out")
    begin(Setting(model="mlp", world=1)).save(tmp_path / "run")
    folder = sc.checkpoint.to_dcp(tmp_path / "run", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="nothing under 'net'; its keys are model, optim"):
        sc.checkpoint.import_dcp(folder, tmp_path / "out", model_key="net")
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match=r"distcp cannot be read"):
        sc.checkpoint.import_dcp(folder, tmp_path / "out")
    assert sc.checkpoint.list_checkpoints(tmp_path / "out") == []
