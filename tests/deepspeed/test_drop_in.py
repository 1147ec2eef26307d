"""The drop-in module: DeepSpeed's names, defaults and errors."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    path = tmp_path / f"ds_config_{sc.Mesh().rank}.json"  # one a rank, so that none reads what another writes
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


FOREIGN = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
FAULTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "optimizer type": ({**CONFIG, "optimizer": {"type": "AdmaW"}}, {}, '"AdmaW"; did you mean "AdamW"'),
    "scheduler type": ({**CONFIG, "scheduler": {"type": "WarmupDecay"}}, {}, 'did you mean "WarmupDecayLR"'),
    "optimizer option": ({**CONFIG, "optimizer": {"type": "RMSprop", "params": {"weight_decy": 0}}}, {}, "weight_decy"),
    "missing file": ("no_such_file.json", {}, "no such file"),
    "no JSON": ("bad.json", {}, "not valid JSON at line 1"),
    "no dict": ([1], {}, "expected a dict, a path or a base64 string"),
    "foreign optimizer": (CONFIG, {"optimizer": FOREIGN}, "not in the model"),
    "scheduler alone": ({"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}}, {}, "without an optimizer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_both_kinds_of_error(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.json").write_text('{"train_batch_size": 8,, }')
    monkeypatch.chdir(tmp_path)
    config, arguments, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message) as found:
        deepspeed.initialize(model=zoo.build("mlp"), config=config, **arguments)
    assert isinstance(found.value, ConfigError)


def test_all_faults_are_told_at_once() -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdmaW"},
        "scheduler": {"type": "WarmupDecay"},
        "gradient_cliping": 1.0,
    }
    for initialize in (sc.initialize, deepspeed.initialize):
        with pytest.raises(ConfigError, match="config has 3 problems") as found:
            initialize(model=zoo.build("mlp"), config=config)
        for name in ("gradient_clipping", "AdamW", "WarmupDecayLR"):
            assert name in str(found.value)


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("from shardcore.deepspeed.ops.lamb import FusedLamb", "'ops.lamb' yet: optimizers are in ops.adam"),
        ("import shardcore.deepspeed.runtime.engine", "'runtime.engine' yet: schedules are in runtime.lr_schedules"),
        ("from shardcore.deepspeed import moe", "'moe' yet: mixture-of-experts layers"),
        ("from shardcore.deepspeed import no_such_name", "'no_such_name' yet; it has DeepSpeedEngine"),
    ],
)
def test_an_import_of_what_is_missing_says_what_to_use(statement: str, hint: str) -> None:
    with pytest.raises(ImportError, match=hint):
        exec(statement)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'shardcore\.no_such_room'"):
        import shardcore.no_such_room  # noqa: F401


def test_initialize_describes_itself() -> None:
    native, drop_in = (inspect.signature(f).parameters for f in (sc.initialize, deepspeed.initialize))
    assert [*drop_in, "drop_in"] == list(native)
    assert "docs/config.md" in (deepspeed.initialize.__doc__ or "")


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
