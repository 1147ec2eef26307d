"""Units used in every way autograd allows give the gradients of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import check_follows, rows
from zero.models import Block

STAGES = [0, 1, 2, 3]
all_stages = pytest.mark.parametrize("stage", STAGES)


class Stack(nn.Module):
    """Three blocks, the first applied ``repeats`` times."""

    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        self.repeats = repeats
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats - 1):
            x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(rows(step, rank, 4, 7)).square().mean()


def play_plain(model: nn.Module, step: int, rank: int) -> None:
    loss_of(model, step, rank).backward()


@all_stages
@spmd(world=2)
def test_c11_layer_applied_four_times(stage: int) -> None:
    check_follows(lambda: Stack(4), play_plain, stage=stage)


@all_stages
@spmd(world=2)
def test_c11_two_forwards_before_one_backward(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        (loss_of(model, step, rank) + 0.5 * loss_of(model, step + 50, rank)).backward()

    check_follows(Stack, play, stage=stage)


@all_stages
@spmd(world=2)
def test_c11_two_backwards_through_one_graph(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        loss = loss_of(model, step, rank)
        loss.backward(retain_graph=True)
        loss.backward()

    check_follows(Stack, play, stage=stage)


class TwoHeads(nn.Module):
    """A trunk with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(7, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.trunk:
            x = block(x)
        return self.heads[0](x), self.heads[1](x)


@all_stages
@spmd(world=2)
def test_c12_two_losses_with_separate_backwards(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        a, b = model(rows(step, rank, 4, 7))
        a.square().mean().backward(retain_graph=True)
        b.square().mean().backward()

    def play_sum(model: nn.Module, step: int, rank: int) -> None:
        a, b = model(rows(step, rank, 4, 7))
        (a.square().mean() + b.square().mean()).backward()

    check_follows(TwoHeads, play, stage=stage, reference_play=play_sum)


class Checkpointed(nn.Module):
    """One block applied in two checkpointed regions, with plain blocks around."""

    def __init__(self, *, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for i in (1, 2, 1):
            x = self._recomputed(self.blocks[i], x)
        return self.head(x)

    def _recomputed(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


@all_stages
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@spmd(world=2)
def test_b20_block_in_two_checkpointed_regions(stage: int, use_reentrant: bool, accumulation: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(accumulation):
            x = rows(10 * step + micro, rank, 4, 7).requires_grad_()
            model(x).square().mean().backward()

    def build() -> nn.Module:
        return Checkpointed(use_reentrant=use_reentrant)

    def without(model: nn.Module, step: int, rank: int) -> None:
        model.use_reentrant = None  # type: ignore[assignment]
        play(model, step, rank)

    check_follows(build, play, stage=stage, reference_play=without)


@all_stages
@spmd(world=2)
def test_b20_whole_model_recomputed_around_its_blocks(stage: int) -> None:
    """Nested: the outer region recomputes the inner ones."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed(use_reentrant=False)
            self.last = Block(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]

    check_follows(Outer, play_plain, stage=stage)


@all_stages
@spmd(world=2)
def test_c13_reentrant_checkpoint_with_a_gradient_for_a_vector(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        out = model(rows(step, rank, 4, 7).requires_grad_())
        out.backward(rows(step + 70, rank, *out.shape))

    check_follows(lambda: Checkpointed(use_reentrant=True), play, stage=stage, steps=4)


class Borrower(nn.Module):
    """Uses the weight of a block that it does not call, and a transposed view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = x + F.linear(torch.tanh(F.linear(x, self.blocks[2].up.weight)), self.blocks[2].down.weight)
        x = self.blocks[1](x)
        return x @ self.blocks[1].up.weight.t()


@all_stages
@spmd(world=2)
def test_weights_used_outside_their_module(stage: int) -> None:
    check_follows(Borrower, play_plain, stage=stage)


class SavedView(nn.Module):
    """A unit whose output keeps a view of its weight alive over the release."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewLayer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ViewLayer(nn.Module):
    """``x @ w.t()``: autograd saves the view, not the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.t() + x @ self.weight[:, ::2].repeat(1, 2)[:, :7])


@all_stages
@spmd(world=2)
def test_saved_views_survive_the_release(stage: int) -> None:
    check_follows(SavedView, play_plain, stage=stage)


class InPlace(nn.Module):
    """Changes the outputs of its units in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y.add_(x)
            x = torch.relu_(y)
        return self.last(x)


@all_stages
@spmd(world=2)
def test_in_place_operations_on_a_units_output(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        out = model(rows(step, rank, 4, 7).requires_grad_())
        out += 1.0
        loss = out.square().mean()
        loss /= 2
        loss.backward()

    check_follows(InPlace, play, stage=stage)


@all_stages
@spmd(world=2)
def test_units_in_another_order_each_step_and_some_left_out(stage: int) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.order = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in self.order:
                x = self.blocks[i](x)
            return x

    def play(model: nn.Module, step: int, rank: int) -> None:
        model.order = [[0, 1, 2, 3], [3, 1], [2, 0, 2], [0, 1, 2, 3], [1]][step]  # type: ignore[assignment]
        play_plain(model, step, rank)

    check_follows(Router, play, stage=stage, steps=5)


@all_stages
@spmd(world=2)
def test_frozen_unit_between_trained_ones_still_passes_gradients(stage: int) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.blocks[1].requires_grad_(False)
        return model

    check_follows(build, play_plain, stage=stage)


@all_stages
@spmd(world=2)
def test_state_dict_between_forward_and_backward(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        loss = loss_of(model, step, rank)
        state = model.state_dict()
        assert state["blocks.0.up.weight"].shape == (13, 7)
        loss.backward()

    check_follows(Stack, play, stage=stage)


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
    owned = {group.full.untyped_storage().data_ptr() for group in root.groups}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.ones(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    assert saved
    assert (
        sum(t.untyped_storage().nbytes() for t in saved if t.untyped_storage().data_ptr() not in owned)
        <= 4 * 2 * 64 * 4
    )
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
