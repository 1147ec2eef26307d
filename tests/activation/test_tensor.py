"""Recomputed blocks of a model that is split over ranks: collectives again in backward, the same random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardcore as sc
from shardcore.tensor import ColumnParallelLinear
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise
from tensor.hugging_face import batch, build, loss

OPTIONS: list[dict[str, Any]] = [
    {},
    {"policy": "selective"},
    {"partition": True},
    {"partition": True, "offload": "cpu", "policy": "selective"},
]


def train(
    name: str, options: dict[str, Any] | None, *, sequence: bool, stage: int, world: int, units: Any = "auto"
) -> list[torch.Tensor]:
    """Losses and parameters after two steps, with dropout. Collective."""
    mesh = sc.Mesh(tp=2, device="cpu")
    torch.manual_seed(7)
    model = build(name, dropout=True)
    sc.tensor.parallelize(model, mesh, sequence=sequence)
    if options is not None:
        sc.activation.wrap(model, **options)
    sc.shard(model, mesh, stage=stage, units=units)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    torch.manual_seed(11 + mesh.data_rank)
    losses = []
    for step in range(2):
        value = loss(model, batch(10 * step + mesh.data_rank))
        value.backward()
        losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + list(sc.state_dict(model, rank0_only=False).values())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("sequence", [False, True])
@spmd(world=2)
def test_n8_f12_the_same_training_at_tp_2(name: str, sequence: bool) -> None:
    """Where the sequence is split, a block's input is a part already, and partition keeps it as it is."""
    expected = train(name, None, sequence=sequence, stage=1, world=2)
    for options in OPTIONS:
        assert_bitwise(train(name, options, sequence=sequence, stage=1, world=2), expected)


@pytest.mark.parametrize("units", ["auto", [ColumnParallelLinear]])
@spmd(world=4)
def test_with_stage_3_over_the_other_ranks(units: Any) -> None:
    """Projections of one input that are units each see it through a view of their own."""
    expected = train("llama", None, sequence=False, stage=3, world=4, units=units)
    for options in (OPTIONS[1], OPTIONS[3]):
        assert_bitwise(train("llama", options, sequence=False, stage=3, world=4, units=units), expected)


@spmd(world=2)
def test_the_configuration_file_splits_and_recomputes() -> None:
    found = []
    for section in ({}, {"partition_activations": True, "cpu_checkpointing": True}, {"policy": "selective"}):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"tp_size": 2},
            "activation_checkpointing": section,
        }
        model = build("llama")
        engine, *_ = sc.initialize(model=model, config=config)
        assert sc.activation.is_wrapped(model) == bool(section)
        value = loss(engine, batch(0))
        engine.backward(value)
        engine.step()
        found.append([value.detach(), *sc.state_dict(model, rank0_only=False).values()])
    assert_bitwise(found[1], found[0])
    assert_bitwise(found[2], found[0])
