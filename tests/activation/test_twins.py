"""Recomputed blocks of sharded models: the same training as without, at every stage, in either order of calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from activation.blocks import Stack, seeded
from shardcore.testing import PeakTensorBytes, run_spmd, spmd
from shardcore.testing.twin import assert_bitwise

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"policy": "selective"},
    "offloaded": {"offload": "cpu"},
    "contiguous, selective": {"policy": "selective", "contiguous": True},
}
PRECISIONS = {"fp32": sc.Precision(), "bf16": sc.Precision(param="bf16"), "fp16": sc.Precision(param="fp16")}


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 5, generator=generator)


def train(
    stage: int,
    options: dict[str, Any] | None,
    *,
    order: str = "wrap first",
    precision: str = "fp32",
    finer: bool = False,
) -> list[torch.Tensor]:
    """Losses and parameters after three steps of two micro-batches, with dropout. Collective."""
    mesh = sc.Mesh(device="cpu")
    model = seeded(lambda: Stack(4))
    if options is not None and order == "wrap first":
        sc.activation.wrap(model, **options)
    sc.shard(
        model, mesh, stage=stage, precision=PRECISIONS[precision],
        units=["Linear", "LayerNorm"] if finer else "auto",
    )  # fmt: skip
    if options is not None and order == "shard first":
        sc.activation.wrap(model, **options)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2, max_grad_norm=0.5)
    torch.manual_seed(20 + mesh.rank)
    losses = []
    for step in range(3):
        for micro in range(2):
            loss = model(data(step, micro, mesh.rank)).float().square().mean()
            (loss / 2).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + list(sc.state_dict(model, rank0_only=False).values())


def check(stage: int, cells: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for options, how in cells:
        plain = {key: value for key, value in how.items() if key != "order"}
        assert_bitwise(train(stage, options, **how), train(stage, None, **plain))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_training_is_the_same_to_the_bit(stage: int) -> None:
    """One process start for a row of settings; the whole product is in the full run."""
    names = list(OPTIONS)
    check(
        stage,
        [
            (OPTIONS[names[stage % 4]], {"order": "wrap first"}),
            (OPTIONS[names[(stage + 1) % 4]], {"order": "shard first", "precision": "bf16"}),
        ],
    )


@spmd(world=2)
def test_units_of_sharding_inside_a_recomputed_block() -> None:
    """Each layer is gathered by itself, in the block's forward and again in its recomputation."""
    check(3, [(OPTIONS["full"], {"finer": True}), (OPTIONS["selective"], {"finer": True, "order": "shard first"})])


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("order", ["wrap first", "shard first"])
def test_every_setting_at_every_stage(stage: int, name: str, precision: str, order: str) -> None:
    how = {"order": order, "precision": precision}
    run_spmd(check, 2, stage, [(OPTIONS[name], how), (OPTIONS[name], {**how, "finer": True})], timeout=240)


class Twice(nn.Module):
    """One block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2, rate=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack.embed(x)
        for i in (0, 1, 0):
            x = self.stack.blocks[i](x)
        return self.stack.head(x)


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_b20_a_block_in_two_places(stage: int) -> None:
    mesh = sc.Mesh(device="cpu")
    found = []
    for options in (None, {}, {"offload": "cpu"}):
        model = seeded(Twice)
        if options is not None:
            sc.activation.wrap(model, units=["Block"], **options)
        sc.shard(model, mesh, stage=stage)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        torch.manual_seed(mesh.rank)
        for step in range(2):
            for micro in range(2):
                model(data(step, micro, mesh.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(sc.state_dict(model, rank0_only=False).values()))
    assert_bitwise(found[1], found[0])
    assert_bitwise(found[2], found[0])


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_step_between_forward_and_backward_is_an_error(stage: int | None, policy: str) -> None:
    """Autograd refuses it for what it saved; what is computed again must not use the new weights unseen."""
    model = sc.activation.wrap(seeded(lambda: Stack(rate=0.0)), policy=policy)
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        sc.shard(model, sc.Mesh(device="cpu"), stage=stage)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    first, second = (model.blocks[1](torch.ones(2, 7, requires_grad=True)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was written to between forward and backward|modified by an inplace"):
        second.backward()


class Wide(nn.Module):
    """A block whose weights outweigh its input by far."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 256)
        self.down = nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@spmd(world=2)
def test_no_gathered_weight_is_kept_at_stage_3() -> None:
    """Between forward and backward there are the blocks' inputs, and of the weights what sharding keeps for the start
    of backward: the last two of ten units.
    """
    x = torch.randn(4, 32)
    model = sc.shard(seeded(lambda: nn.Sequential(*(Wide() for _ in range(10)))), sc.Mesh(device="cpu"), stage=3)
    sc.activation.wrap(model, units=[Wide])
    model(x).sum().backward()  # the first backward is watched; buffers are made
    gc.collect()
    with PeakTensorBytes() as live:
        loss = model(x).sum()
        kept = live.current_nbytes() - live.start_nbytes
    loss.backward()
    one_unit, inputs = 4 * (2 * 32 * 256 + 256 + 32), 10 * x.nbytes
    assert kept < inputs + 2.5 * one_unit, (kept, inputs, one_unit)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's look at its inputs
@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=2)
def test_compiled_blocks(stage: int) -> None:
    """The graphs run as they are, since generated kernels round otherwise."""
    mesh = sc.Mesh(device="cpu")
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        model = sc.activation.wrap(seeded(lambda: Stack(3, rate=0.0)))
        if is_compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        sc.shard(model, mesh, stage=stage)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in range(2):
            model(data(step, 0, mesh.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(sc.state_dict(model, rank0_only=False).values()))
    assert_bitwise(found[1], found[0])
