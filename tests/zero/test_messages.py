"""What common mistakes with a sharded model are told: the way that leads on, not only what went wrong."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd


@spmd(world=2)
def test_moves_and_casts_belong_before_shard() -> None:
    model = sc.shard(nn.Linear(4, 4), stage=3)
    for move in (model.cpu, model.half, model.bfloat16, model.double, lambda: model.to("meta")):
        with pytest.raises(StateError, match=r"move the model before shardcore\.shard"):
            move()
    with pytest.raises(StateError, match="was used by 'data'"):
        model.weight.data  # noqa: B018


@spmd(world=2)
def test_a_pickled_model_is_refused_with_what_to_save() -> None:
    for stage in (0, 3):
        model = sc.shard(nn.Linear(4, 4), stage=stage)
        with pytest.raises(StateError, match=r"shardcore\.state_dict\(model\)"):
            torch.save(model, io.BytesIO())
    with pytest.raises(StateError, match=r"shardcore\.state_dict\(model\)"):
        pickle.dumps(model.weight)


@spmd(world=2)
def test_a_grad_scaler_is_pointed_to_the_precision() -> None:
    for stage in (2, 3):
        model = sc.shard(nn.Linear(4, 4), stage=stage)
        optimizer = sc.optimizer("sgd", model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        with pytest.raises(StateError, match='precision="fp16"'):
            scaler.step(optimizer)


@spmd(world=2)
def test_devices_that_are_not_there_are_named() -> None:
    sc.Mesh()
    for device in ("gpu", "meta", *(() if torch.cuda.is_available() else ("cuda", "cuda:1"))):
        with pytest.raises(ConfigError, match=rf"Mesh\(device='{device}'\)"):
            sc.Mesh(device=device)
