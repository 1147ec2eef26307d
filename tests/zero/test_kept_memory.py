"""Stage 3: what code keeps of the parameters' memory stays readable, and the model goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Block

WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": torch.Tensor.detach,
    "a view": lambda p: p.detach().view(-1)[1:],
    "numpy": lambda p: p.detach().numpy(),
    "__array__": lambda p: p.detach().__array__(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "from_numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "shared memory": lambda p: p.detach().share_memory_(),
}


def values(kept: Any) -> list[float]:
    return torch.as_tensor(kept).reshape(-1).tolist()


@pytest.mark.parametrize("way", WAYS)
@spmd(world=2)
def test_what_summon_showed_keeps_its_memory(way: str) -> None:
    rank = sc.Mesh().rank
    kept: list[tuple[Any, list[float]]] = []

    def play(model: nn.Module, step: int, data_rank: int) -> None:
        if find_root(model) is not None:
            assert all(values(array) == then for array, then in kept)
            with sc.summon(model):
                for param in model.parameters():
                    array = WAYS[way](param)
                    kept.append((array, values(array)))
        model(rows(step, data_rank, 4, 7)).square().mean().backward()

    model = check_follows(lambda: nn.Sequential(Block(), nn.Linear(7, 3)), play, stage=3, steps=4, units=[Block])
    assert all(values(array) == then for array, then in kept)
    assert kept[0][1] != kept[-2 * len(kept) // 4][1], f"rank {rank}: training went on"
    released = [group.full.untyped_storage().nbytes() for group in find_root(model).groups]
    assert not any(released)


@spmd(world=2)
def test_numpy_in_a_forward_changes_nothing() -> None:
    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest = float(abs(self.weight.detach().numpy()).max())
            return super().forward(x)

    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 7)).square().mean().backward()

    check_follows(lambda: nn.Sequential(Looking(7, 7), nn.Tanh(), Looking(7, 3)), play, stage=3, units=[Looking])


@spmd(world=2)
def test_what_a_forward_put_aside_is_an_error_once_it_is_released_and_the_model_goes_on() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = [self.weight.detach(), self.weight.detach().view(-1)[2:]]
            return super().forward(x)

    def play(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4, 7)).square().mean().backward()
        if find_root(model) is not None:
            for layer in (model[0], model[2]):
                for seen in layer.seen:
                    with pytest.raises(RuntimeError, match=r"shows parameters of unit .* was released .* clone\(\)"):
                        seen.sum()
                    with pytest.raises(RuntimeError, match="was released"):
                        seen.numpy()

    check_follows(lambda: nn.Sequential(Keeping(7, 7), nn.Tanh(), Keeping(7, 3)), play, stage=3, units=[Keeping])


@spmd(world=2)
def test_a_graph_from_before_summon_can_still_run_backward() -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        loss = model(rows(step, rank, 4, 7)).square().mean()
        if find_root(model) is not None:
            with sc.summon(model):
                sum(float(param.detach().numpy().sum()) for param in model.parameters())
        loss.backward()

    check_follows(lambda: nn.Sequential(Block(), Block()), play, stage=3, units=[Block])


@spmd(world=2)
def test_a_context_that_nobody_took_anything_from_keeps_the_memory_as_it_was() -> None:
    model = sc.shard(nn.Sequential(Block(), Block()), stage=3, units=[Block])
    before = [group.full.untyped_storage()._cdata for group in find_root(model).groups]
    with sc.summon(model):
        sum(float(param.detach().sum()) for param in model.parameters())
    assert [group.full.untyped_storage()._cdata for group in find_root(model).groups] == before
