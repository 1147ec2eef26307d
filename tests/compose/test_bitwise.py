"""What must agree to the last bit: stages among each other, and a run with itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise, assert_close_trees
from zero.twin import Recipe, train_sharded

CASES = ["odd", "tied", "nested", "gpt"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulation", [1, 3])
@spmd(world=[2, 3])
def test_stages_1_to_3_agree(case: str, accumulation: int) -> None:
    """Stages 2 and 3 always; stage 1 sums micro-batches before ranks, so it joins them at accumulation 1."""
    mesh = sc.Mesh()
    recipe = Recipe(case=case, accumulation=accumulation, clip=0.5, steps=4)
    one, two, three = (train_sharded(dataclasses.replace(recipe, stage=stage), mesh) for stage in (1, 2, 3))
    assert_bitwise(three.parameters, two.parameters)
    assert_bitwise([three.losses, three.norms], [two.losses, two.norms])
    if accumulation == 1:
        assert_bitwise(one.parameters, two.parameters)
        assert_bitwise([one.losses, one.norms], [two.losses, two.norms])
    else:
        assert_close_trees(one.parameters, two.parameters, rtol=1e-6, atol=1e-6)


class Residual(nn.Module):
    """A block that uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).tanh()


class Skipping(nn.Module):
    """Blocks with a skip around them, so that the input of the first has three uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        return self.head(self.blocks(x) + x)


@spmd(world=[1, 2])
def test_stages_add_up_the_gradients_of_an_input_in_one_order() -> None:
    def trained(stage: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        mesh = sc.Mesh()
        model = sc.shard(Skipping(), mesh, stage=stage, units=[Residual])
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(mesh.rank))
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with sc.summon(model):
            return [param.detach().clone() for param in model.parameters()]

    one, two, three = (trained(stage) for stage in (1, 2, 3))
    assert_bitwise(one, two)
    assert_bitwise(two, three)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=3)
def test_a_run_repeats_itself(stage: int) -> None:
    mesh = sc.Mesh()
    recipe = Recipe(case="tied", stage=stage, accumulation=2, steps=4)
    first, second = train_sharded(recipe, mesh), train_sharded(recipe, mesh)
    assert_bitwise(first.parameters, second.parameters)
    assert_bitwise(first.losses, second.losses)


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_the_size_of_segments_does_not_matter(stage: int) -> None:
    """Buckets cut at other places hold the same elements on the same ranks' sums: W = 2 sums are commutative."""
    mesh = sc.Mesh()
    recipe = Recipe(case="tied", stage=stage, steps=4)
    assert_bitwise(train_sharded(recipe, mesh, segment_nbytes=128).parameters, train_sharded(recipe, mesh).parameters)
