"""What loops and libraries do to parameters and gradients between passes: right, or refused at once."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Perceptron
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def build(stage: int, precision: str = "fp32") -> nn.Module:
    torch.manual_seed(1)
    return sc.shard(Perceptron(), stage=stage, precision=sc.Precision(param=precision))


def play(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 7)).square().mean().backward()


def clear_a_part(model: nn.Module, step: int, rank: int) -> None:
    """A backward whose gradients are forgotten, in the ways that users know."""
    model(rows(50 + step, rank, 4, 7)).square().mean().backward()
    if step == 0:
        for param in model.parameters():
            param.grad = None
    elif step == 1:
        nn.ModuleList([model]).zero_grad()  # a wrapper
    else:
        model.blocks.zero_grad()
        model.head.zero_grad()
        del model.gain.grad
        model.nothing.grad = None
    play(model, step, rank)


@all_stages
@spmd(world=2)
def test_gradients_are_cleared_as_users_clear_them(stage: int) -> None:
    def reference(model: nn.Module, step: int, rank: int) -> None:
        play(model, step, rank)

    check_follows(Perceptron, clear_a_part, stage=stage, reference_play=reference)


@all_stages
@spmd(world=2)
def test_a_part_whose_gradient_was_dropped_is_not_updated(stage: int) -> None:
    model = build(stage)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1, weight_decay=0.1)
    before = whole_parameters(model)
    play(model, 0, sc.Mesh().rank)
    model.blocks[1].zero_grad()
    model.gain.grad = None
    optimizer.step()
    for name, value in whole_parameters(model).items():
        untouched = name.startswith("blocks.1.") or name in ("gain", "nothing")
        assert torch.equal(value, before[name]) == untouched, name


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_a_gradient_set_by_hand_is_refused(stage: int) -> None:
    model = build(stage)
    for between in (lambda: None, lambda: play(model, 0, 0)):
        between()
        with pytest.raises(StateError, match=r"'gain'.*safe_set_full_grad"):
            model.gain.grad = torch.ones(1)


@spmd(world=2)
def test_a_gradient_set_by_hand_at_stage_0_counts() -> None:
    for backward_first in (False, True):
        model = build(0)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
        before = whole_parameters(model)
        if backward_first:
            play(model, 0, sc.Mesh().rank)
        model.gain.grad = torch.full((1,), 2.0)
        assert model.gain.grad is not None
        assert model.gain.grad.item() == 2.0
        optimizer.step()
        after = whole_parameters(model)
        assert torch.equal(after["gain"], before["gain"] - 2.0)
        assert torch.equal(after["head.bias"], before["head.bias"]) != backward_first


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_writes_through_data_last(stage: int, precision: str) -> None:
    """After sharding and between steps; at stage 3 they are refused."""
    model = build(stage, precision)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.0)
    for value in (2.0, 3.0):
        if stage == 3:
            with pytest.raises(StateError, match="summon"):
                model.gain.data.fill_(value)
            continue
        model.gain.data.fill_(value)
        model(rows(0, sc.Mesh().rank, 4, 7)).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert whole_parameters(model)["gain"].item() == value


@all_stages
@spmd(world=2)
def test_casts_and_moves_after_sharding_are_refused_at_once(stage: int) -> None:
    model = build(stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for between in (lambda: None, lambda: play(model, 0, 0)):
        between()
        for move in (model.half, model.double, lambda: model.to(torch.bfloat16)):
            with pytest.raises(StateError, match=r"shardcore\.shard|summon"):
                move()
    optimizer.step()
    assert all(param.dtype == torch.float32 for param in model.parameters())
    if stage == 3:
        return
    assert model.to("cpu") is model
    model.float()
    play(model, 1, 0)
    model.head.to("meta")  # torch makes new parameters here
    with pytest.raises(StateError, match="replaced by another object"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
@spmd(world=2)
def test_parameters_read_as_ordinary_ones_where_they_are_whole(stage: int) -> None:
    model = build(stage)
    play(model, 0, 0)
    assert "requires_grad=True" in repr(model.gain)
    assert isinstance(model.gain, nn.Parameter)
    assert (model.gain + 1).item() == 2.0
    copied = copy.deepcopy(model.gain)
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, model.gain)
    assert torch.nn.utils.parameters_to_vector(model.head.parameters()).shape == (24,)


def test_the_norm_of_nothing_is_zero_where_no_gradient_waits() -> None:
    program = (  # a process of its own, without models of other tests whose gradients wait
        "import torch, shardcore as sc\n"
        "model = sc.shard(torch.nn.Linear(2, 2), stage=2)\n"
        "assert torch.nn.utils.get_total_norm([]) == 0.0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_b38_torchs_norms_called_directly(stage: int) -> None:
    model = build(stage)
    play(model, 0, sc.Mesh().rank)
    params = list(model.parameters())
    with pytest.raises(StateError, match="full_grad"):
        torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    with pytest.raises(StateError, match="max_grad_norm"):
        torch.nn.utils.clip_grads_with_norm_(params, 1.0, torch.tensor(5.0))
    assert torch.nn.utils.get_total_norm([torch.ones(4)]).item() == 2.0
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 1.0, torch.tensor(5.0))


def two_optimizers(model: nn.Module, make: Any) -> list[Any]:
    """One optimizer for the blocks and one for the rest, each with its own clipping."""
    blocks = list(model.blocks.parameters())
    inside = set(blocks)
    rest = [param for param in model.parameters() if param not in inside]
    return [make(torch.optim.SGD, blocks, 0.05), make(torch.optim.AdamW, rest, 0.2)]


@all_stages
@spmd(world=2)
def test_two_optimizers_of_one_model_clip_and_clear_their_own(stage: int) -> None:
    mesh = sc.Mesh()
    torch.manual_seed(1)
    alone = Perceptron()
    clips: dict[Any, float] = {}

    def plain(cls: Any, params: list[nn.Parameter], clip: float) -> Any:
        optimizer = cls(params, lr=0.1)
        clips[optimizer] = clip
        return optimizer

    model = build(stage)
    ours = two_optimizers(model, lambda cls, params, clip: sc.optimizer(cls, params, lr=0.1, max_grad_norm=clip))
    theirs = two_optimizers(alone, plain)
    for step in range(4):
        play(model, step, mesh.rank)
        for rank in range(2):
            (alone(rows(step, rank, 4, 7)).square().mean() / 2).backward()
        # Step 1 updates the blocks alone, step 2 with what the rest has gathered since.
        for left, right in list(zip(ours, theirs, strict=True))[: 1 if step == 1 else 2]:
            norm = torch.nn.utils.clip_grad_norm_(right.param_groups[0]["params"], clips[right])
            left.step()
            right.step()
            assert left.grad_norm == pytest.approx(float(norm), rel=1e-5)
            left.zero_grad()
            right.zero_grad()
    found = whole_parameters(model)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


@spmd(world=2)
def test_two_optimizers_need_one_loss_scale() -> None:
    model = build(2, "fp16")
    first = sc.optimizer(torch.optim.SGD, model.blocks.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="parameter groups"):
        sc.optimizer(torch.optim.SGD, model.head.parameters(), lr=0.1)
    sc.optimizer(torch.optim.SGD, model, lr=0.1)  # over the same parameters: takes the first one's place
    assert first.holds(model.blocks[0].up.weight)


@all_stages
@spmd(world=2)
def test_a_second_step_with_the_same_gradients_scales_them_once(stage: int) -> None:
    torch.manual_seed(1)
    model = sc.shard(nn.Linear(2, 1, bias=False), stage=stage, precision=sc.Precision(loss_scale=64.0))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
    start = whole_parameters(model)["weight"]
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    for num_steps in (1, 2):
        optimizer.step()
        torch.testing.assert_close(
            whole_parameters(model)["weight"], start - num_steps * torch.tensor([[3.0, 4.0]]), rtol=1e-5, atol=1e-5
        )


@spmd(world=1)
def test_one_rank_watches_too() -> None:
    for stage in (0, 2):
        model = build(stage)
        root: Any = find_root(model)
        assert root.needs_unit_hooks == (stage > 0)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        for step in range(2):
            play(model, step, 0)
            model.gain.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert model.gain.item() == 1.0
