"""Memory of a released unit is never read: outputs that alias parameters, inputs written to in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcore.testing import spmd
from shardcore.zero.units import assign_units
from zero.following import check_follows, rows

both_ends = pytest.mark.parametrize("stage", [2, 3])


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 8, 6))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:, :length]


class Learned(nn.Module):
    """Adds learned positions, which are a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x + self.positions(x.shape[1]))))  # type: ignore[no-any-return]


class Scaling(nn.Module):
    """Frozen; scales its input in place, so that backward needs the scale after the input's own gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5, requires_grad=False)
        self.linear = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(self.scale)
        return torch.tanh(self.linear(x))


class Scaled(nn.Module):
    """A frozen unit between trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), Scaling(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x) + 0))  # type: ignore[no-any-return]


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name for unit in assign_units(model, "auto").units]


def play(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 3, 4, 6)).square().mean().backward()


@both_ends
@spmd(world=2)
def test_a_unit_that_returns_a_view_of_its_parameter(stage: int) -> None:
    check_follows(Learned, play, stage=stage, units=[Positions, nn.Linear])


@both_ends
@spmd(world=2)
def test_a_frozen_unit_that_writes_to_its_input(stage: int) -> None:
    check_follows(Scaled, play, stage=stage, units=[Scaling, nn.Linear])


def test_blocks_are_units_not_the_layers_inside_them() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    network = nn.ModuleDict({"blocks": nn.ModuleList([Block() for _ in range(4)]), "head": nn.Linear(6, 9)})
    assert unit_names(network) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "root"]
    nested = nn.Sequential(*[nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]) for _ in range(5)])
    assert unit_names(nested) == ["0", "1", "2", "3", "4"]
    assert unit_names(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))) == ["0", "2"]
