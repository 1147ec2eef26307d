"""What happens around training steps: passes without gradients, other models, exceptions; nothing stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardcore as sc
from shardcore import _torch_private as private
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.test_autograd_traps import Stack, all_stages, loss_of, play_plain


def look_in_between(model: nn.Module) -> None:
    """Everything one does with a model between steps without training it."""
    x = torch.ones(2, 7)
    with torch.no_grad():
        first = model(x)
    model.eval()
    with torch.inference_mode():
        second = model(x)
    model(x)  # with a graph that is dropped
    model.train()
    assert torch.equal(first, second)


@all_stages
@spmd(world=2)
def test_c21_passes_without_training_in_between(stage: int) -> None:
    check_follows(Stack, play_plain, stage=stage, between=look_in_between)


@all_stages
@spmd(world=2)
def test_c21_inference_mode_before_the_first_step(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        if step == 0:
            with torch.inference_mode():
                model(rows(9, rank, 2, 7))
        play_plain(model, step, rank)

    check_follows(Stack, play, stage=stage)


@all_stages
@spmd(world=2)
def test_c20_three_models_in_one_process(stage: int) -> None:
    """Actor and critic train, a frozen teacher judges; each equals its run alone."""
    torch.manual_seed(1)
    teacher_weights = Stack()
    teacher = sc.shard(copy.deepcopy(teacher_weights), stage=stage)
    critic = sc.shard(copy.deepcopy(teacher_weights), stage=stage)
    critic_optimizer = sc.optimizer(torch.optim.SGD, critic, lr=0.1)

    def play(model: nn.Module, step: int, rank: int) -> None:
        x = rows(step, rank, 4, 7)
        is_sharded = find_root(model) is not None
        with torch.no_grad():
            target = (teacher if is_sharded else teacher_weights)(x)
        out = model(x)
        if is_sharded:
            critic(x).sum().backward()
        F.mse_loss(out, target + 1).backward()
        if is_sharded:
            critic_optimizer.step()
            critic_optimizer.zero_grad()

    check_follows(Stack, play, stage=stage)
    alone = copy.deepcopy(teacher_weights)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            (alone(rows(step, rank, 4, 7)).sum() / 2).backward()
        plain.step()
        plain.zero_grad()
    with sc.summon(critic):
        for name, param in critic.named_parameters():
            torch.testing.assert_close(param.detach(), alone.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def num_gathered(model: nn.Module) -> int:
    """Groups whose whole parameters are in memory."""
    root: Any = find_root(model)
    return sum(group.full.untyped_storage().nbytes() > 0 for group in root.groups)


@spmd(world=2)
def test_c18_nothing_stays_gathered() -> None:
    model = sc.shard(Stack(3), stage=3)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    assert num_gathered(model) == 0
    loss = loss_of(model, 0, 0)
    assert num_gathered(model) == 0, "after forward"
    loss.backward()
    assert num_gathered(model) == 0, "after backward"
    optimizer.step()
    assert num_gathered(model) == 0, "after step"
    with torch.no_grad():
        model(torch.ones(1, 7))
    assert num_gathered(model) == 0, "after a pass without gradients"
    with sc.summon(model):
        assert num_gathered(model) > 0
    assert num_gathered(model) == 0, "after summon"
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert num_gathered(model) == 0, "after an exception in forward"


@spmd(world=2)
def test_c18_frozen_linear_saves_no_weight_of_its_own() -> None:
    """What autograd saves of a frozen unit is an alias of the one storage that is released."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    sc.shard(model, stage=3, units=[nn.Linear])
    root: Any = find_root(model)
    owned = {private.storage_id(group.full) for group in root.groups}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.ones(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    assert saved
    assert sum(t.untyped_storage().nbytes() for t in saved if private.storage_id(t) not in owned) <= 4 * 2 * 64 * 4
    out.sum().backward()
    assert x.grad is not None
    assert num_gathered(model) == 0


@all_stages
@spmd(world=2)
def test_exception_in_forward_then_reset_iteration(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        if find_root(model) is not None:
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.ones(2, 5))  # every rank fails alike
            sc.reset_iteration(model)
        play_plain(model, step, rank)

    check_follows(Stack, play, stage=stage)


@all_stages
@spmd(world=2)
def test_exception_in_backward_then_reset_iteration(stage: int) -> None:
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("bomb")

    class Armed(Stack):
        armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](x))
            x = Bomb.apply(x) if self.armed else x
            return self.head(self.blocks[2](x))

    def play(model: nn.Module, step: int, rank: int) -> None:
        if find_root(model) is not None:
            model.armed = True  # type: ignore[assignment]
            with pytest.raises(ValueError, match="bomb"):
                play_plain(model, step, rank)
            model.armed = False  # type: ignore[assignment]
            sc.reset_iteration(model)
        play_plain(model, step, rank)

    check_follows(Armed, play, stage=stage)


@all_stages
@spmd(world=2)
def test_gradient_of_the_input_and_retained_gradients(stage: int) -> None:
    model = sc.shard(Stack(), stage=stage)
    torch.manual_seed(0)
    alone = Stack()
    with sc.summon(model):
        alone.load_state_dict({k: v.detach().clone() for k, v in model.named_parameters()})
    x = rows(0, 0, 4, 7).requires_grad_()
    y = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    alone(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@spmd(world=2)
def test_torch_autograd_grad_for_inputs_leaves_parameters_without_gradients() -> None:
    model = sc.shard(Stack(), stage=3)
    x = rows(0, 0, 4, 7).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x])
    assert grad.shape == x.shape
    assert num_gathered(model) == 0
