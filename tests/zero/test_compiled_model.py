"""``torch.compile`` of the whole model: hooks break the graph, and training is that of the model itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Block


class Mixed(nn.Module):
    """Units, parameters of the model's own between them, and a part that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(7, 7), nn.LayerNorm(7), Block()
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.second(self.norm(self.first(x))) * self.gain)


def plain_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 7))


# The compiler looks at .grad of what enters a graph after a break, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("build", [plain_layers, Mixed])
@pytest.mark.parametrize("way", ["torch.compile(model)", "model.compile()"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@spmd(world=2, timeout=240)
def test_a_model_compiled_as_a_whole_follows_the_plain_one(
    stage: int, way: str, build: Callable[[], nn.Module]
) -> None:
    torch.compiler.reset()  # the process has compiled for other tests
    compiled: dict[int, nn.Module] = {}

    def play(model: nn.Module, step: int, rank: int) -> None:
        if id(model) not in compiled and way == "model.compile()":
            model.compile(backend="aot_eager")
        if id(model) not in compiled:
            whole = model if way == "model.compile()" else torch.compile(model, backend="aot_eager")
            compiled[id(model)] = whole
        compiled[id(model)](rows(step, rank, 4 + step % 2, 7)).square().mean().backward()

    def plain(model: nn.Module, step: int, rank: int) -> None:
        model(rows(step, rank, 4 + step % 2, 7)).square().mean().backward()

    units = [nn.Linear, Block] if build is Mixed else "auto"
    check_follows(build, play, stage=stage, reference_play=plain, units=units, steps=4, tolerance=1e-5)
