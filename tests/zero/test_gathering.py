"""Whole parameters for a while: what is written reaches every rank and every copy, or nobody. Tests carry fault ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import rows
from zero.models import Perceptron
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
gathered = deepspeed.zero.GatheredParameters


def build(stage: int, precision: str = "fp32", **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return sc.shard(Perceptron(), stage=stage, precision=sc.Precision(param=precision), **options)


def same_everywhere(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters, equal on all ranks in all their copies."""
    root: Any = find_root(model)
    found = whole_parameters(model)
    prints = {name: sc.comm.fingerprint(value) for name, value in found.items()}
    everywhere = sc.comm.exchange(prints, root.data_axis, "test")
    assert all(theirs == everywhere[0] for theirs in everywhere)
    for group in root.groups:
        assert torch.equal(group.master.to(group.own.dtype), group.own)
    return found


def do_nothing() -> None:
    """What a rank does that leaves the work to another."""


def fill(value: float, *tensors: torch.Tensor) -> None:
    """Write in place."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_c7_the_modifier_ranks_edits_reach_all_ranks_and_copies(stage: int, precision: str) -> None:
    model = build(stage, precision)
    rank = sc.Mesh().rank
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.5)
    weight, gain = model.blocks[1].up.weight, model.gain
    before = whole_parameters(model)
    with gathered([weight, gain], modifier_rank=1), torch.no_grad():
        if rank == 1:
            weight.fill_(0.5)
            gain.data.mul_(2)  # leaves no trace in the version counter
    with gathered(weight), gathered([gain]):
        assert (weight == 0.5).all()
        assert gain.item() == 2.0
    for name, value in same_everywhere(model).items():
        if name not in ("blocks.1.up.weight", "gain"):
            assert torch.equal(value, before[name])
    model(rows(0, rank, 4, 7)).square().mean().backward()
    optimizer.step()
    with gathered(gain):
        assert abs(gain.item() - 2.0) < 1.0, "the next step starts from the edit"


@all_stages
@spmd(world=2)
def test_c7_a_write_for_reading_is_undone_and_raises_on_every_rank(stage: int) -> None:
    model = build(stage)
    rank = sc.Mesh().rank
    before = whole_parameters(model)
    weight = model.blocks[1].up.weight

    def in_place() -> None:
        with torch.no_grad():
            weight.fill_(9.0)

    def past_the_counter() -> None:
        weight.data.fill_(9.0)

    for on_ranks in ((0,), (0, 1)):
        for write in (in_place, past_the_counter):
            for context in (lambda: sc.summon(model), lambda: gathered(model), lambda: gathered([weight])):
                with pytest.raises(StateError, match=r"\['blocks\.1\.up\.weight'\].*undone"), context():
                    (write if rank in on_ranks else do_nothing)()
                after = same_everywhere(model)
                assert all(torch.equal(after[name], before[name]) for name in before)


@all_stages
@spmd(world=2)
def test_a_parameter_that_was_not_listed_may_not_be_written_to(stage: int) -> None:
    model = build(stage)
    before = whole_parameters(model)
    up = model.blocks[1].up
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight"), gathered([up.bias], modifier_rank=0):
        fill(3.0, up.bias, up.weight)
    after = same_everywhere(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


@all_stages
@spmd(world=2)
def test_writeback_needs_the_same_where_writes_leave_no_trace(stage: int) -> None:
    """``.data`` passes by the version counters."""
    model = build(stage)
    rank = sc.Mesh().rank
    before = whole_parameters(model)
    weight = model.blocks[1].up.weight
    named = r"\['blocks\.1\.up\.weight'\].*undone"
    for on_ranks in ((0, 1), (0,), (1,)):
        with pytest.raises(RankMismatchError, match=named), sc.summon(model, writeback=True):
            fill(1.0 + rank, *([weight.data] if rank in on_ranks else []))
    after = same_everywhere(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    with sc.summon(model, writeback=True):
        weight.data.fill_(5.0)
    assert (same_everywhere(model)["blocks.1.up.weight"] == 5).all()


@all_stages
@spmd(world=2)
def test_writeback_needs_the_same_on_all_ranks(stage: int) -> None:
    model = build(stage)
    rank = sc.Mesh().rank
    before = whole_parameters(model)
    with pytest.raises(RankMismatchError, match=r"'gain'.*undone"), sc.summon(model, writeback=True), torch.no_grad():
        model.gain.fill_(float(rank))
    with pytest.raises(RankMismatchError, match=r"'gain'"), sc.summon(model, writeback=True):
        fill(5.0, *([model.gain] if rank == 0 else []))
    after = same_everywhere(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    with sc.summon(model, writeback=True), torch.no_grad():
        model.gain.fill_(5.0)
    assert float(same_everywhere(model)["gain"]) == 5.0


@all_stages
@spmd(world=2)
def test_nested_contexts_keep_their_own_rules(stage: int) -> None:
    model = build(stage, "bf16")
    rank = sc.Mesh().rank
    up, gain = model.blocks[0].up, model.gain
    with gathered(model), torch.no_grad():
        with gathered([gain], modifier_rank=0), gathered(up, modifier_rank=1):
            if rank == 0:
                gain.fill_(4.0)
            if rank == 1:
                up.bias.fill_(2.0)
        assert gain.item() == 4.0
        assert (up.bias == 2.0).all()
    with (
        pytest.raises(StateError, match="gain"),
        gathered(gain, modifier_rank=0),
        gathered(gain),
        torch.no_grad(),
    ):
        gain.fill_(1.0)
    found = same_everywhere(model)
    assert float(found["gain"]) == 4.0
    assert (found["blocks.0.up.bias"] == 2.0).all()


@all_stages
@spmd(world=2)
def test_passes_of_the_model_inside_a_context(stage: int) -> None:
    """Generation inside GatheredParameters; edits before it are kept."""
    model = build(stage)
    x = rows(0, 0, 4, 7)
    with torch.no_grad():
        expected = model(x)
    with gathered(model.head, modifier_rank=0), torch.no_grad():
        model.head.weight.mul_(2)
        model.head.bias.mul_(2)
        doubled = model(x)
        assert model.head.weight.shape == (3, 7)
        assert (model.head.weight != 0).any()
    torch.testing.assert_close(doubled, 2 * expected)
    with torch.no_grad():
        assert torch.equal(model(x), doubled)
    if stage == 3:
        with pytest.raises(StateError, match="summon"):
            model.head.weight.sum()


def fill_and_fail(tensor: torch.Tensor) -> None:
    """An edit that is followed by an error."""
    fill(7.0, tensor)
    raise KeyError("mine")


@all_stages
@spmd(world=2)
def test_an_exception_inside_is_the_one_that_is_seen(stage: int) -> None:
    model = build(stage)
    before = whole_parameters(model)
    with pytest.raises(KeyError, match="mine"), gathered(model):
        fill_and_fail(model.gain)
    after = same_everywhere(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


@spmd(world=2)
def test_arguments() -> None:
    model = build(3)
    with pytest.raises(ConfigError, match=r"modifier_rank=7.*\[0, 1\]"), gathered(model, modifier_rank=7):
        pass
    with gathered(model, enabled=False), pytest.raises(StateError):
        model.gain.sum()
    plain = nn.Linear(2, 2)
    with gathered(plain, modifier_rank=0), torch.no_grad():
        plain.weight.fill_(1.0)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model(rows(0, 0, 4, 7)).mean().backward()
    with sc.summon(model), pytest.raises(StateError, match="leave the context"):
        optimizer.step()


@spmd(world=2)
def test_masters_of_what_was_not_edited_keep_their_precision() -> None:
    model = build(2, "bf16")
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1e-3)
    model(rows(0, 0, 4, 7)).square().mean().backward()
    optimizer.step()
    masters = {name: sc.zero.full_master(param) for name, param in model.named_parameters()}
    with sc.summon(model, writeback=True), torch.no_grad():
        model.gain.fill_(2.0)
    for name, param in model.named_parameters():
        found = sc.zero.full_master(param)
        assert found is not None
        assert torch.equal(found, torch.full_like(found, 2.0) if name == "gain" else masters[name])
