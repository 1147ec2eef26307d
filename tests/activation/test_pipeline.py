"""Recomputed layers in a pipeline: random numbers by micro-batch and layer, and a backward that is split in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from activation.blocks import Block, seeded
from shardcore.errors import ConfigError
from shardcore.pipeline import Pipeline
from shardcore.testing import run_spmd, spmd
from shardcore.testing.twin import assert_bitwise

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"policy": "selective"},
    "offloaded": {"offload": "cpu"},
    "contiguous": {"contiguous": True},
}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), *(Block() for _ in range(4)), nn.Linear(7, 3))


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).square().mean()


def batches() -> Any:
    generator = torch.Generator().manual_seed(0)
    return iter([(torch.randn(3, 5, generator=generator), torch.randn(3, 3, generator=generator)) for _ in range(12)])


def train(schedule: str, stage: int, options: dict[str, Any] | None) -> list[torch.Tensor]:
    """Losses and this rank's parameters after three steps of four micro-batches. Collective."""
    mesh = sc.Mesh(pp=2, device="cpu")
    model = seeded(layers)
    if options is not None:
        sc.activation.wrap(model, units=[Block], **options)
    pipe = Pipeline(model, mesh, schedule=schedule, num_microbatches=4, loss_fn=loss)
    sc.shard(pipe, mesh, stage=stage)
    optimizer = sc.optimizer(torch.optim.AdamW, pipe, lr=1e-2)
    data = batches()
    losses = [pipe.train_batch(data, optimizer) for _ in range(3)]
    return losses + list(sc.state_dict(pipe, rank0_only=False).values())


def check(schedule: str, stage: int, names: list[str]) -> None:
    expected = train(schedule, stage, None)
    for name in names:
        assert_bitwise(train(schedule, stage, OPTIONS[name]), expected)


@pytest.mark.parametrize(("schedule", "stage"), [("zb-h1", 1), ("1f1b", 3)])
@spmd(world=2)
def test_n8_dropout_in_stages(schedule: str, stage: int) -> None:
    check(schedule, stage, ["selective", "contiguous"])


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_schedule(schedule: str, stage: int) -> None:
    run_spmd(check, 2, schedule, stage, list(OPTIONS), timeout=240)


def engine_run(section: dict[str, Any], interval: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    specs = [deepspeed.pipe.LayerSpec(Block) for _ in range(4)]
    pipe = deepspeed.PipelineModule(specs, 2, loss_fn=loss, activation_checkpoint_interval=interval)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        **section,
    }
    calls: list[int] = []
    for module in pipe.modules():
        if isinstance(module, Block):
            module.up.register_forward_pre_hook(lambda *_: calls.append(1))
    engine, *_ = deepspeed.initialize(model=pipe, config=config)
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(1))
    losses = [_step(engine, x) for _ in range(2)]
    return [*losses, torch.tensor(len(calls))]


def _step(engine: Any, x: torch.Tensor) -> torch.Tensor:
    return engine.train_batch(iter([(x[i : i + 2], x[i : i + 2]) for i in range(0, 8, 2)])).detach()


@spmd(world=2)
def test_the_file_recomputes_layers_of_a_pipeline() -> None:
    *losses, calls = engine_run({})
    assert calls == 2 * 2 * 4, "two steps, two blocks on this rank, four micro-batches"
    for section, interval in (
        ({"activation_checkpointing": {"policy": "full", "cpu_checkpointing": True}}, 0),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, 2),
        ({"pipeline": {"activation_checkpoint_interval": 2}}, 0),
        ({"activation_checkpointing": {"policy": "full", "units": ["Block"]}}, 0),
    ):
        *found, twice = engine_run(section, interval)
        assert_bitwise(found, losses)
        assert twice == 2 * calls, section
    with pytest.raises(ConfigError, match="of class Other: the pipeline has none; its layers are of Block"):
        engine_run({"activation_checkpointing": {"policy": "full", "units": ["Other"]}})
