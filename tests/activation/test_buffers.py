"""Buffers that a block writes to: one step of them for one forward, and the same outputs when it is run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from activation.blocks import results, seeded
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise


class Replaces(nn.Module):
    """Puts a new tensor into its buffer at each forward, and computes with the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.tanh(self.layer(x) * self.mean + self.table)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return output


BLOCKS: dict[str, Any] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh()),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()),
    "replaced buffer": Replaces,
    "two calls": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)),
}


def train(model: nn.Module, num_calls: int) -> list[Any]:
    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_calls):
            x = model(x)
        return x

    found: list[Any] = []
    for seed, training in enumerate((True, True, False, True)):
        model.train(training)
        found.append(results(call, list(model.parameters()), 5, 6, seed=seed))
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("options", [{}, {"policy": "selective"}, {"offload": "cpu"}], ids=str)
def test_buffers_make_the_steps_of_the_plain_model(name: str, options: dict[str, Any]) -> None:
    num_calls = 2 if name == "two calls" else 1
    plain = seeded(lambda: nn.Sequential(BLOCKS[name]()))
    model = seeded(lambda: nn.Sequential(BLOCKS[name]()))
    sc.activation.wrap(model, units=[model[0]], **options)
    assert_bitwise(train(model, num_calls), train(plain, num_calls))


def test_a_region_of_a_module_counts_one_step() -> None:
    norm = nn.BatchNorm1d(3)
    for step in range(1, 4):
        sc.activation.checkpoint(norm, torch.randn(4, 3)).square().sum().backward()
        assert norm.num_batches_tracked == step


@spmd(world=2)
def test_buffers_of_a_sharded_model() -> None:
    mesh = sc.Mesh(device="cpu")
    found = []
    for is_wrapped in (False, True):
        model = seeded(lambda: nn.Sequential(*(BLOCKS["batch norm"]() for _ in range(3))))
        if is_wrapped:
            sc.activation.wrap(model, units=list(model))
        sc.shard(model, mesh, stage=3, units=list(model))
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in range(2):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*sc.state_dict(model, rank0_only=False).values(), *(b.clone() for b in model.buffers())])
    assert_bitwise(found[1], found[0])
