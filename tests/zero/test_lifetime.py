"""A model that is dropped is freed: nothing global, and no hook, keeps its parameters."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import spmd, tensor_bytes
from zero.models import Block


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=[1, 2])
def test_a_dropped_model_is_freed(stage: int) -> None:
    before = tensor_bytes(collect=True)
    for trains in (False, True):
        model = sc.shard(nn.Sequential(Block(), Block(), nn.Linear(7, 3)), stage=stage)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
        if trains:
            model(torch.ones(2, 7)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        alive = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert alive() is None
        sc.comm.exchange(0, sc.Mesh()["dp"], "test")  # the gather of updated parameters holds them until it has ended
        deadline = time.monotonic() + 5
        while tensor_bytes(collect=True) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tensor_bytes(collect=True) <= before
