"""The optimizer's own step under an engine, in mid-window."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import shardcore as sc
from engine.loops import batches, config
from shardcore.errors import StateError
from shardcore.testing import spmd, zoo
from zero.twin import whole_parameters

SETTINGS: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}


def make(stage: int, accumulation: int) -> sc.Engine:
    engine, _, _, _ = sc.initialize(model=zoo.build("mlp"), config=config(stage, accumulation, **SETTINGS))
    return engine


def backward(engine: sc.Engine, index: int) -> None:
    engine.backward(zoo.loss(engine, batches("mlp", engine.mesh, index, 1)[0]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_the_optimizers_own_step_ends_the_window(stage: int) -> None:
    """Two micro-batches of four: their mean; the engine then counts from the start."""
    left, right = make(stage, 4), make(stage, 2)
    backward(left, 0)
    left.step()
    backward(left, 1)
    assert left.optimizer is not None
    left.optimizer.step()
    with pytest.raises(StateError, match="took the same gradients"):
        left.step()
    left.optimizer.zero_grad()
    for index in range(2):
        backward(right, index)
        right.step()
    for name, value in whole_parameters(left.module).items():
        torch.testing.assert_close(value, whole_parameters(right.module)[name], rtol=1e-5, atol=1e-6)
    boundaries = []
    for index in range(4):
        backward(left, index)
        left.step()
        boundaries.append(left.global_steps)
    assert boundaries == [0, 0, 0, 1]


@spmd(world=2)
def test_clearing_in_mid_window_starts_it_anew() -> None:
    engine = make(2, 2)
    backward(engine, 0)
    engine.step()
    engine.module.zero_grad()
    backward(engine, 1)
    engine.step()
    assert engine.global_steps == 0
    backward(engine, 2)
    engine.step()
    assert engine.global_steps == 1


@spmd(world=2)
def test_a_window_of_backwards_without_steps_is_remarked_on_once() -> None:
    engine = make(1, 2)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(logging.getLogger("shardcore"), "warning", lambda text, *values: said.append(text % values))
        for _ in range(2):
            backward(engine, 0)
            backward(engine, 1)
            engine.step()
    assert engine.global_steps == 1
    assert len(said) == (engine.global_rank == 0)
    assert all("one micro-batch of 2 for the 2 backwards" in text for text in said)
