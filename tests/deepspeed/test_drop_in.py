"""The drop-in module: DeepSpeed's names, defaults and errors."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd, zoo

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


@spmd(world=2)
def test_the_loop_of_a_deepspeed_script(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    deepspeed.init_distributed()
    model = zoo.build("mlp")
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    assert (loader, scheduler) == (None, None)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    losses = []
    for _ in range(20):
        loss = zoo.loss(engine, zoo.rank_slice(zoo.batch("mlp", 0, 8), engine.global_rank, 2))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert engine.gradient_clipping() == 1.0, "DeepSpeed's own default"
    assert optimizer is engine.optimizer


@spmd(world=2)
def test_edits_reach_all_ranks_and_the_next_forward() -> None:
    settings = {**CONFIG, "bf16": {"enabled": True}}
    engine, _, _, _ = deepspeed.initialize(model=zoo.build("mlp"), config=settings)
    weight = engine.module[0].weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        if engine.global_rank == 0:
            with torch.no_grad():
                weight.fill_(0.5)
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight, torch.full_like(weight, 0.5))
    with pytest.raises(StateError, match=r"0\.weight"), deepspeed.zero.GatheredParameters(weight), torch.no_grad():
        weight.fill_(0.25)
    zoo.loss(engine, zoo.batch("mlp", 0, 4)).backward()
    engine.step()
    with deepspeed.zero.GatheredParameters(engine.module):
        assert (weight - 0.5).abs().max() < 0.01, "the edit reached the fp32 masters that the step updated"


@spmd(world=2)
def test_batch_errors_are_both_kinds() -> None:
    wrong = {**CONFIG, "train_micro_batch_size_per_gpu": 3}
    for kind in (AssertionError, ConfigError, ValueError):
        with pytest.raises(kind, match="8"):
            deepspeed.initialize(model=zoo.build("mlp"), config=wrong)
    with pytest.raises(ConfigError) as native:
        sc.initialize(model=zoo.build("mlp"), config=wrong)
    assert not isinstance(native.value, AssertionError)


@spmd(world=2)
def test_wrong_arguments() -> None:
    model = zoo.build("mlp")
    with pytest.raises(AssertionError, match="requires a model"):
        deepspeed.initialize(config=CONFIG)
    with pytest.raises(AssertionError, match="no configuration"):
        deepspeed.initialize(model=model)
    with pytest.raises(AssertionError, match="given 2 times"):
        deepspeed.initialize(model=model, config=CONFIG, config_params=CONFIG)
    both = {**CONFIG, "fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimisation": {"stage": 2}}
    with pytest.raises(AssertionError, match=r"(?s)fp16.*bf16") as error:
        deepspeed.initialize(model=model, config=both)
    assert "zero_optimization" in str(error.value), "all problems at once, with the nearest name"
    with pytest.raises(ConfigError, match="backend"):
        deepspeed.init_distributed(dist_backend="smoke-signals")
    deepspeed.initialize(model=model, config=CONFIG)  # the failures above changed nothing


@spmd(world=2)
def test_no_trainable_parameter() -> None:
    model = zoo.build("mlp").requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable"):
        deepspeed.initialize(model=model, config=CONFIG)


def test_the_version_is_the_packages() -> None:
    assert deepspeed.__version__ == sc.__version__


def test_importing_starts_nothing() -> None:
    code = (
        "import threading, shardcore.deepspeed, torch\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not torch.distributed.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
