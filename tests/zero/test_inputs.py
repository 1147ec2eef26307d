"""What a unit's forward does to its inputs besides computing with them, where others use them as well."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore import comm
from shardcore.errors import StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import check_follows, rows, seeded

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
Deed = Callable[["Block", torch.Tensor], None]


class Block(nn.Module):
    """Does something to its input, and computes."""

    def __init__(self, deed: Deed) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.deed = deed
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.deed(self, x)
        return torch.tanh(self.linear(x))


class Residual(nn.Module):
    """Each block's input goes past it, too."""

    def __init__(self, deed: Deed) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(deed) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def play(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 6)).square().mean().backward()


def halve(block: Block, x: torch.Tensor) -> None:
    x.register_hook(lambda grad: grad * 0.5)


def halve_and_clamp(block: Block, x: torch.Tensor) -> None:
    halve(block, x)
    x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def halve_and_take_back(block: Block, x: torch.Tensor) -> None:
    handle = x.register_hook(lambda grad: grad * 0.5)
    x.register_hook(lambda grad: grad * 2)
    block.seen.append(handle)


def write_and_halve(block: Block, x: torch.Tensor) -> None:
    x.mul_(2)
    halve(block, x)


def halve_and_write(block: Block, x: torch.Tensor) -> None:
    halve(block, x)
    x.mul_(torch.tanh(block.linear(x * 1.0)))


def halve_write_and_clamp(block: Block, x: torch.Tensor) -> None:
    halve_and_write(block, x)
    x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def retain(block: Block, x: torch.Tensor) -> None:
    x.retain_grad()
    block.seen = [x]


def unsqueeze(block: Block, x: torch.Tensor) -> None:
    x.unsqueeze_(0)


def replace_data(block: Block, x: torch.Tensor) -> None:
    x.data = x.data * 2


DEEDS = {
    "halve": halve,
    "halve and clamp": halve_and_clamp,
    "write and halve": write_and_halve,
    "halve and write": halve_and_write,
    "halve, write and clamp": halve_write_and_clamp,
}


@STAGES
@pytest.mark.parametrize("deed", DEEDS.values(), ids=DEEDS)
@spmd(world=[1, 2])
def test_a_hook_on_an_input_changes_the_whole_gradient(deed: Deed, stage: int) -> None:
    check_follows(lambda: Residual(deed), play, stage=stage, units=[Block])


@STAGES
@spmd(world=2)
def test_a_hook_on_an_input_is_taken_back_by_its_handle(stage: int) -> None:
    def take_back(model: nn.Module, step: int, rank: int) -> None:
        loss = model(rows(step, rank, 4, 6)).square().mean()
        for module in model.modules():
            if isinstance(module, Block):
                module.seen.pop().remove()
        loss.backward()

    check_follows(lambda: Residual(halve_and_take_back), take_back, stage=stage, units=[Block])


@STAGES
@spmd(world=2)
def test_retain_grad_of_an_input_keeps_its_whole_gradient(stage: int) -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        loss = model(rows(0, sc.Mesh().rank, 4, 6)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [block.seen[0].grad for block in model.blocks]

    expected = gradients(seeded(lambda: Residual(retain)))
    sharded = sc.shard(seeded(lambda: Residual(retain)), sc.Mesh(device="cpu"), stage=stage, units=[Block])
    torch.testing.assert_close(gradients(sharded), expected)


@pytest.mark.parametrize("deed", [halve, retain])
@spmd(world=2)
def test_hooks_on_inputs_keep_no_graph(deed: Deed) -> None:
    def run() -> weakref.ref[torch.Tensor]:
        scale = torch.ones(6)
        out = model(rows(0, 0, 4, 6)) * scale  # the graph keeps the scale
        out.square().mean().backward(retain_graph=True)
        return weakref.ref(scale)

    gc.collect()
    gc.disable()
    try:
        model = sc.shard(seeded(lambda: Residual(deed)), sc.Mesh(device="cpu"), stage=3, units=[Block])
        scale = run()
        for block in model.blocks:
            block.seen = []
        assert scale() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("deed", [unsqueeze, replace_data])
@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=2)
def test_an_input_of_another_shape_or_memory_is_refused(deed: Deed, stage: int) -> None:
    model = sc.shard(Residual(deed), sc.Mesh(device="cpu"), stage=stage, units=[Block])
    with pytest.raises(StateError, match=r"unit 'blocks.0' gave one of its inputs another shape or other memory"):
        model(rows(0, 0, 4, 6))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(6, 6), Block(write_and_halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.stem(x).t())


@spmd(world=2)
def test_a_hook_on_a_view_that_is_written_to_is_refused() -> None:
    model = sc.shard(Transposed(), sc.Mesh(device="cpu"), stage=3, units=[Block])
    with pytest.raises(StateError, match=r"unit 'block' wrote in place to an input that is a view .* and hooked"):
        model(rows(0, 0, 6, 6))


class Recomputed(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@STAGES
@spmd(world=2)
def test_hooks_on_inputs_of_recomputed_units_act_as_in_torch(stage: int) -> None:
    """Recomputation runs the forward again, and with it what it hooks."""

    def gradients(model: Any) -> list[torch.Tensor]:
        model(rows(0, sc.Mesh().rank, 4, 6)).square().mean().backward()
        return [block.seen[0].grad for block in model.blocks]

    check_follows(lambda: Recomputed(halve), play, stage=stage, units=[Block])
    expected = gradients(seeded(lambda: Recomputed(retain)))
    sharded = sc.shard(seeded(lambda: Recomputed(retain)), sc.Mesh(device="cpu"), stage=stage, units=[Block])
    torch.testing.assert_close(gradients(sharded), expected)


class History(nn.Module):
    """A block that adds its output to the list that it is given, and returns the list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, history: list[torch.Tensor]) -> list[torch.Tensor]:
        history.append(torch.tanh(self.linear(history[-1])))
        return history


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(History() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        history = [x]
        for block in self.blocks:
            history = block(history)
        return torch.stack(history).sum(0)


@spmd(world=2)
def test_units_that_hand_a_container_through_are_gathered_twice_a_step() -> None:
    """Once for forward and once for backward; what only passes through needs nothing of the unit."""
    model = check_follows(Growing, play, stage=3, units=[History])
    comm.reset_traffic()
    play(model, 0, 0)
    assert comm.traffic()["gather"] <= 2 * sum(group.nbytes for group in find_root(model).groups)
