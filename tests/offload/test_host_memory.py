"""The host memory of an offload is what its plan says, to the byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore as sc
from offload.given import CountedPool
from offload.homes import HOMES, train_steps
from shardcore import plan
from shardcore.errors import PlanError
from shardcore.offload import taking
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import seeded
from zero.models import ZOO


@pytest.mark.parametrize("home", HOMES)
@spmd(world=2)
def test_pools_are_what_the_plan_says(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both precisions, with one group of options and with two, on each rank."""
    monkeypatch.setattr(taking, "HostPool", CountedPool)
    mesh, settings, draw = sc.Mesh(), HOMES[home], random.Random(home)
    for precision in ("fp32", "bf16"):
        for num_groups in (1, 2):
            stage = 3 if "params" in settings else draw.choice((1, 2, 3))
            CountedPool.taken.clear()
            path = tmp_path if "nvme" in settings.values() else None
            model = sc.shard(
                seeded(ZOO[draw.choice(("odd", "frozen", "tied"))].build),
                mesh,
                stage=stage,
                precision=sc.Precision(param=precision),
                offload=sc.Offload(**settings, path=path),
            )
            named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
            options_of = {name: number % num_groups for number, (name, _) in enumerate(named)}
            groups = [
                {"params": [param for name, param in named if options_of[name] == number], "weight_decay": number / 10}
                for number in range(num_groups)
            ]
            optimizer = sc.optimizer(torch.optim.AdamW, groups, lr=0.1)
            expected = plan.host_memory(
                [group.layout for group in find_root(model).groups],
                plan.Homes(**settings, device_is_host=True),
                rank=mesh.rank,
                options_of=options_of,
            )
            assert sum(CountedPool.taken) == expected.total, (home, precision, num_groups)
            store = getattr(optimizer._update, "store", None)
            shards = find_root(model).groups[0].store
            files = [each._file.nbytes for each in (store, shards) if each is not None]
            assert sum(files) == expected.disk
            parts = (expected.params, expected.masters, expected.grads, expected.states)
            assert sum(parts) <= expected.total <= sum(parts) + 512 * 8 * len(find_root(model).groups)


@spmd(world=1)
def test_training_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "HostPool", CountedPool)
    CountedPool.taken.clear()
    offload = sc.Offload(params="nvme", states="nvme", grads="cpu", path=tmp_path, tile_numel=100)
    model = sc.shard(seeded(ZOO["odd"].build), stage=3, precision=sc.Precision(param="bf16"), offload=offload)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
    before = list(CountedPool.taken)
    train_steps(model, optimizer, sc.Mesh(), range(3))
    assert CountedPool.taken == before


def test_half_a_billion_parameters_on_a_disk() -> None:
    """Gradient shard, tiles and nothing else; and of parameters on a disk, a quarter and a unit at most."""
    hidden = 1280
    sizes = {"qkv": 3, "out": 1, "up": 4, "down": 4}
    blocks = [
        (f"{i}", [(f"{i}.{name}", n * hidden * hidden, "bf16", True) for name, n in sizes.items()]) for i in range(24)
    ]
    embedding = ("embed", [("embed", 50304 * hidden, "bf16", True)])
    shards = plan.plan_shards([embedding, *blocks], num_shards=1, segment_nbytes=64 << 20)
    numel = sum(layout.shard_numel for _, layout in shards.groups)
    assert numel > 500_000_000
    found = plan.host_memory(shards, plan.Homes(states="nvme", grads="cpu"))
    assert found.grads == 4 * numel
    assert found.states == 4 * (12 << 22)
    assert (found.params, found.masters) == (0, 0)
    assert 12 * numel <= found.disk <= 12 * numel + 4096 * 400
    budget, unit = 2 * numel // 4, max(2 * layout.shard_numel for _, layout in shards.groups)
    found = plan.host_memory(shards, plan.Homes(params="nvme", host_param_nbytes=budget))
    assert budget - 512 < found.total <= budget + unit


@pytest.mark.parametrize("settings", [{"master": "int8"}, {"kept": ("fp12",)}])
def test_unknown_dtypes_are_refused(settings: dict[str, Any]) -> None:
    shards = plan.plan_shards([("unit", [("weight", 10, "bf16", True)])], num_shards=1)
    with pytest.raises(PlanError, match="expected one of fp64, fp32, bf16, fp16"):
        plan.host_memory(shards, plan.Homes(states="cpu", **settings))
