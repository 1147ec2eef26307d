"""Settings that differ between ranks are named at once, on every rank; wrong ones are named before anything is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, RankMismatchError
from shardcore.testing import spmd

SHARD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "stage": ([{"stage": 2}, {"stage": 3}], "stage=2 against stage=3"),
    "precision": (
        [{"precision": "bf16"}, {"precision": sc.Precision(param="fp16")}],
        "precision.param='bf16' against precision.param='fp16'",
    ),
    "loss scale": (
        [{"precision": sc.Precision(loss_scale=2.0)}, {}],
        "precision.loss_scale=2.0 against precision.loss_scale=None",
    ),
    "budget": ([{"budget": 1 << 20}, {"budget": 2 << 20}], "prefetch.budget=1048576 against prefetch.budget=2097152"),
    "one budget": ([{}, {"budget": 1 << 20}], "prefetch=None against no prefetch"),
    "segments": ([{"segment_nbytes": 64}, {}], "segment_nbytes=64 against segment_nbytes=None"),
    "communication": (
        [{}, {"communication": sc.Communication(reduce="int8")}],
        "communication.reduce=None against communication.reduce='int8'",
    ),
}


@spmd(world=2)
def test_shard_compares_its_settings() -> None:
    mesh = sc.Mesh()
    for what, (given, difference) in SHARD.items():
        with pytest.raises(RankMismatchError) as found:
            sc.shard(nn.Linear(4, 4), mesh, **given[mesh.rank])
        assert difference in str(found.value), what
        assert "ranks [0] and ranks [1]" in str(found.value)


@spmd(world=2)
def test_the_optimizer_compares_its_options() -> None:
    mesh = sc.Mesh()
    model = sc.shard(nn.Linear(4, 4), mesh, stage=2)
    bias = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.1 * mesh.rank}]
    makes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "lr of group 0=0.1 against lr of group 0=0.2": ("sgd", model, {"lr": (mesh.rank + 1) / 10}),
        "algorithm=SGD against algorithm=AdamW": (["sgd", "adamw"][mesh.rank], model, {"lr": 0.1}),
        "max_grad_norm=None against max_grad_norm=1.0": ("sgd", model, {"max_grad_norm": [None, 1.0][mesh.rank]}),
        "weight_decay of group 1=0.0 against weight_decay of group 1=0.1": ("sgd", bias, {"lr": 0.1}),
        "params of group 0=['weight'] against params of group 0=['bias']": (
            "sgd",
            [[model.weight], [model.bias]][mesh.rank],
            {},
        ),
    }
    for difference, (algorithm, targets, options) in makes.items():
        with pytest.raises(RankMismatchError) as found:
            sc.optimizer(algorithm, targets, **options)
        assert difference in str(found.value)
    instance = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5 + mesh.rank))
    with pytest.raises(RankMismatchError, match=r"lr of group 0=0\.5 against lr of group 0=1\.5"):
        sc.optimizer(instance, model)
    sc.optimizer("sgd", model, lr=0.1)


@spmd(world=2)
def test_initialize_compares_the_configuration() -> None:
    mesh = sc.Mesh()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1 + mesh.rank}
    with pytest.raises(RankMismatchError, match=r"batch\.accumulation_steps=1 against batch\.accumulation_steps=2"):
        sc.initialize(model=nn.Linear(4, 4), config=config)


@spmd(world=2)
def test_axes_that_nothing_uses_are_refused() -> None:
    for axis, why in (("cp", "does not share sequences"), ("ep", "has no experts that lie over it")):
        mesh = sc.Mesh(**{axis: 2})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"{axis}=2, but Linear {why}"):
            sc.shard(nn.Linear(4, 4), mesh)
        with pytest.raises(ConfigError, match=rf"{axis}=2, but Linear {why}"):
            sc.shard(nn.Linear(4, 4), mesh["dp"])
    with pytest.raises(ConfigError, match=r"tp=2, but Linear is not split over it.*shardcore\.tensor\.parallelize"):
        sc.shard(nn.Linear(4, 4), sc.Mesh(tp=2))


@pytest.mark.parametrize("given", ["bf16", "bfloat16", torch.bfloat16, sc.Precision(param=torch.bfloat16)])
@spmd(world=1)
def test_precision_may_be_a_dtype(given: Any) -> None:
    model = sc.shard(nn.Linear(4, 4), stage=2, precision=given)
    assert model.weight.dtype == torch.bfloat16
    assert sc.Precision(param=torch.bfloat16, master=torch.float32) == sc.Precision(param="bfloat16", master="fp32")


@spmd(world=1)
def test_arguments_of_another_kind_are_named() -> None:
    for name, value, wanted in (
        ("precision", 16, "expected shardcore.Precision"),
        ("precision", "bf61", "not a floating dtype"),
        ("precision", torch.int8, "not a floating dtype"),
        ("communication", "int8", "expected a Communication"),
        ("prefetch", 1 << 20, "expected a PrefetchLimits"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            sc.shard(nn.Linear(4, 4), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="master=None"):
        sc.Precision(master=None)  # type: ignore[arg-type]
