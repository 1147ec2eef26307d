"""A configuration as text, as JSON, and as a value."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest

from config.loading import load
from shardcore.config import load_config

FULL: dict[str, Any] = {
    "train_batch_size": 8,
    "fp16": {"enabled": True, "loss_scale_window": 7},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "reduce_scatter": True},
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}},
    "elsewhere": True,
    "x-mine": 1,
}


def test_explain_tells_values_origins_reasons_and_notes() -> None:
    text = load(True, **FULL).explain()
    for line in (
        "config, DeepSpeed's defaults",
        "  batch: 8 samples a step = 2 per rank x 2 accumulated x 2 data-parallel ranks",
        "  train_batch_size = 8 (given)",
        "  gradient_accumulation_steps = 2 (worked out)",
        "  gradient_clipping = 1.0 (default)",
        "  fp16.loss_scale_window = 7 (given)",
        '  optimizer.params = {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.0} (given)',
        "  zero_optimization.reduce_bucket_size = 500000000 (default)",
        "  zero_optimization.reduce_scatter = true: stages 1 to 3 always reduce by reduce-scatter",
        '  zero_optimization.reduce_bucket_size: "auto" stands for the default, 500000000',
        "  elsewhere: unknown top-level key, not read",
    ):
        assert line in text.split("\n"), line
    assert "worked out once the number" in load_config({"train_batch_size": 8}).explain()
    assert "\n  optimizer." not in load().explain()


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize(
    "source",
    [FULL, {}, {"bf16": {"enabled": True}, "gradient_clipping": 2, "data_parallel_size": 2}, {"gradient_clipping": 0}],
)
def test_to_json_loads_to_the_same_configuration(source: dict[str, Any], drop_in: bool) -> None:
    first = load(drop_in, **source)
    again = load_config(json.loads(first.to_json()), data_world=2, drop_in=drop_in)
    for name in ("batch_sizes", "gradients", "optimizer", "scheduler", "fp16", "bf16", "zero", "data", "logging"):
        assert getattr(again, name) == getattr(first, name)
    assert again.to_json() == first.to_json()


def test_a_configuration_can_be_pickled_and_cannot_be_changed() -> None:
    config = load(**FULL)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.zero.stage = 1  # type: ignore[misc]


def test_the_room_does_without_torch() -> None:
    code = (
        "import sys; from shardcore.config import load_config; "
        "load_config({'train_batch_size': 1, 'scheduler': {'type': 'StepLR', 'params': {'step_size': 1}}}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
