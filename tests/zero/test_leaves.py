"""Modules that are one unit, parameters used outside their module. Tests named after a fault carry its id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root, find_slot
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded
from zero.models import Block


class Experts(nn.Module):
    """A mixture: each rank sends its rows to experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.wanted: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.experts[i](x) for i in self.wanted]).mean(0)


class Mixture(nn.Module):
    """Two layers of experts between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 7)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.leave = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def route(model: nn.Module, step: int, rank: int) -> None:
    """Ranks use disjoint experts, others in each step."""
    for layer in model.layers:
        layer.wanted = (0, 1) if (rank + step) % 2 == 0 else (2, 3)
    model(rows(step, rank, 4, 7)).square().mean().backward()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("form", ["units", "marked"])
@spmd(world=2)
def test_c1_c2_ranks_that_use_different_experts_of_a_leaf(stage: int, form: str) -> None:
    def build() -> nn.Module:
        model = Mixture()
        if form == "marked":
            assert set_z3_leaf_modules(model, [Experts]) == list(model.layers)
        return model

    model = check_follows(build, route, stage=stage, units=[Experts] if form == "units" else "auto", steps=4)
    root: Any = find_root(model)
    owners = {find_slot(param).group for param in model.layers[0].parameters()}
    assert all(group.name.startswith("layers.0#") for group in owners)
    assert not any("experts" in unit.name for unit in root.units)


@spmd(world=2)
def test_leaves_are_set_found_and_taken_back() -> None:
    model = Mixture()
    assert get_z3_leaf_modules(model) == []
    set_z3_leaf_modules(model, ["Experts", nn.LayerNorm])
    assert get_z3_leaf_modules(model)[0] is model.layers[0]
    unset_z3_leaf_modules(model, [nn.LayerNorm])
    assert get_z3_leaf_modules(model) == list(model.layers)
    with pytest.raises(ValueError, match=r"NoSuchBlock.*Experts"):
        set_z3_leaf_modules(model, ["NoSuchBlock"])
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings)
    with pytest.raises(StateError, match="before the model is sharded"):
        set_z3_leaf_modules(engine.module, [Experts])


@spmd(world=2)
def test_the_configuration_names_leaves() -> None:
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    for leaves in ({"classes": ["Experts", "OfAnotherModel"]}, {"names": ["layers.0", "layers.1"]}):
        settings["zero_optimization"] = {"stage": 3, "leaf_module": leaves}
        engine, _, _, _ = deepspeed.initialize(model=Mixture(), config=settings)
        assert get_z3_leaf_modules(engine.module) == list(engine.module.layers)
    settings["zero_optimization"] = {"stage": 3, "leaf_module": {"name_suffixes": ["experts", ".1"]}}
    engine, _, _, _ = deepspeed.initialize(model=Mixture(), config=settings)
    assert [type(module) for module in get_z3_leaf_modules(engine.module)][:2] == [nn.ModuleList, Block]
    for leaves in ({"names": ["nowhere"]}, {"classes": ["Nowhere"]}):
        settings["zero_optimization"] = {"stage": 3, "leaf_module": leaves}
        with pytest.raises(ConfigError, match="owhere"):
            deepspeed.initialize(model=Mixture(), config=settings)


class MixtralSparseMoeBlock(Experts):
    """Called as that of transformers is, which the configuration takes for a leaf by default."""


@spmd(world=2)
def test_the_known_sparse_blocks_are_leaves_by_default() -> None:
    model = nn.Sequential(MixtralSparseMoeBlock(), nn.Linear(7, 3))
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    deepspeed.initialize(model=model, config=settings)
    assert get_z3_leaf_modules(model) == [model[0]]


class Borrower(nn.Module):
    """Its forward uses a weight that another module holds."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(7, 7)
        object.__setattr__(self, "lender", lender)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.lender.weight


class Lending(nn.Module):
    """Says at construction which parameter is used elsewhere, or leaves it to be found out."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = Borrower(self.first)
        if registers:
            deepspeed.zero.register_external_parameter(self.second, self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def play(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 7)).square().mean().backward()


def groups_of(model: nn.Module, module: nn.Module) -> list[str]:
    root: Any = find_root(model)
    return [group.name for unit in root.units if unit.module is module for group in unit.groups]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("registers", [True, False])
@spmd(world=2)
def test_a_parameter_used_outside_its_module(stage: int, registers: bool) -> None:
    model = check_follows(
        lambda: Lending(registers), play, stage=stage, units=lambda name, module: name in ("first", "second")
    )
    if stage == 3:
        assert "first#0" in groups_of(model, model.second), "registered, or found out"


@spmd(world=2)
def test_external_parameters_of_a_sharded_model() -> None:
    model = sc.shard(seeded(lambda: Lending(False)), stage=3, units=lambda name, module: name in ("first", "second"))
    own = groups_of(model, model.second)
    deepspeed.zero.register_external_parameter(model.second, model.first.weight)
    assert groups_of(model, model.second) == [*own, "first#0"]
    deepspeed.zero.unregister_external_parameter(model.second, model.first.weight)
    assert groups_of(model, model.second) == own
    deepspeed.zero.unregister_external_parameter(model.first, model.first.weight)
    assert groups_of(model, model.first) == ["first#0"], "a unit's own parameters stay"
    with pytest.raises(ConfigError, match="not in the sharded model"):
        deepspeed.zero.register_external_parameter(nn.Linear(2, 2), model.first.weight)
    with pytest.raises(ConfigError, match="expected a parameter, got str"):
        deepspeed.zero.register_external_parameter(model.second, "first.weight")  # type: ignore[arg-type]
