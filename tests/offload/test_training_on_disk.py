"""Training with states on a disk: its traffic, its edges and its faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardcore as sc
from offload.given import names
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise
from zero.models import Vector, step_with_gradient
from zero.twin import whole_parameters


@spmd(world=4)
def test_d2_ranks_without_an_element(tmp_path: Path) -> None:
    mesh, found = sc.Mesh(), []
    on_disk = [sc.Offload(params=params, states="nvme", path=tmp_path) for params in ("cpu", "nvme")]
    for offload in (None, *on_disk):
        model = sc.shard(Vector(3), mesh, stage=3, offload=offload)
        optimizer = sc.optimizer(sc.optim.CPUAdamW, model, lr=0.1)
        for step in range(2):
            step_with_gradient(model, optimizer, [1.0, 2.0, step])
        found.append(whole_parameters(model))
    assert_bitwise(found[1:], [found[0]] * 2)


@spmd(world=2)
def test_d4_two_models_in_one_folder(tmp_path: Path) -> None:
    mesh = sc.Mesh()
    pairs = []
    for numel in (2501, 40):
        model = sc.shard(
            Vector(numel), mesh, stage=2, offload=sc.Offload(states="nvme", path=tmp_path, tile_numel=1000)
        )
        pairs.append((model, sc.optimizer(torch.optim.AdamW, model, lr=0.1)))
    for step in range(3):
        for model, optimizer in pairs:
            step_with_gradient(model, optimizer, [1.0 + step] * model.weight.numel())
    for model, _ in pairs:
        alone = sc.shard(Vector(model.weight.numel()), mesh, stage=2, offload=sc.Offload(states="cpu", tile_numel=1000))
        optimizer = sc.optimizer(torch.optim.AdamW, alone, lr=0.1)
        for step in range(3):
            step_with_gradient(alone, optimizer, [1.0 + step] * model.weight.numel())
        assert_bitwise(whole_parameters(model), whole_parameters(alone))
    assert names(tmp_path) == []


@spmd(world=1)
def test_edits_reach_states_on_a_disk(tmp_path: Path) -> None:
    """What is written into parameters is what the next step starts from, in 16 bits too."""
    for precision in ("fp32", "bf16"):
        model = sc.shard(
            Vector(5),
            stage=2,
            precision=sc.Precision(param=precision),
            offload=sc.Offload(states="nvme", path=tmp_path, tile_numel=2),
        )
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0, momentum=0.5)
        step_with_gradient(model, optimizer, [1.0] * 5)
        with torch.no_grad():
            model.weight.copy_(torch.arange(5.0))
        step_with_gradient(model, optimizer, [0.0] * 5)
        assert model.weight.tolist() == [i - 0.5 for i in range(5)]


LOADS: dict[str, Callable[[nn.Module, dict[str, torch.Tensor], Path], object]] = {
    "by the model": lambda model, weights, path: model.load_state_dict(weights),
    "by name": lambda model, weights, path: sc.load_state_dict(model, weights),
    "from a file": lambda model, weights, path: sc.load_safetensors(model, path),
}


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_weights_loaded_in_mid_training_reach_masters_on_a_disk(
    way: str, stage: int, precision: str, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    torch.manual_seed(0)
    weights = make().to(sc.Precision.of(precision).param_dtype).state_dict()
    mesh, found, file = sc.Mesh(), [], tmp_path / "weights.safetensors"
    if mesh.rank == 0:
        save_file(weights, file)
    for home in ("cpu", "nvme"):
        torch.manual_seed(1)
        offload = sc.Offload(states=home, path=tmp_path if home == "nvme" else None)
        model = sc.shard(make(), mesh, stage=stage, precision=precision, offload=offload)
        optimizer = sc.optimizer("adamw", model, lr=0.1)
        for step in range(4):
            if step == 2:
                LOADS[way](model, weights, file)
            model(torch.ones(2, 5)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole_parameters(model))
    assert_bitwise(found[1], found[0])


@spmd(world=1)
def test_disk_traffic_is_what_the_plan_says(tmp_path: Path) -> None:
    """24 bytes a parameter and step for Adam, less what host memory keeps."""
    model = sc.shard(Vector(10 * 1024), stage=2, offload=sc.Offload(states="nvme", path=tmp_path, tile_numel=1024))
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
    store = optimizer._update.store
    seen = []
    for _ in range(3):
        before = (store.read_nbytes, store.written_nbytes)
        step_with_gradient(model, optimizer, [1.0] * 10 * 1024)
        seen.append((store.read_nbytes - before[0], store.written_nbytes - before[1]))
    num_moved, tile_nbytes = 10 - 4, 12 * 1024
    assert seen == [(0, num_moved * tile_nbytes)] + [(num_moved * tile_nbytes,) * 2] * 2
    assert store.host_nbytes == 4 * tile_nbytes
