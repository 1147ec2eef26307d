"""Hooks that users put on parameters by ``register_post_accumulate_grad_hook``, before sharding and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import StateError
from shardcore.testing import spmd
from zero.following import rows, seeded
from zero.twin import largest_difference, whole_parameters

Hook = Callable[[nn.Parameter], None]

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def drop(param: nn.Parameter) -> None:
    param.grad = None


def halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def halve_data(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data.mul_(0.5)


def replace(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.sign()


def write(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.add_(1.0)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def expected(hook: Hook, world: int) -> dict[str, torch.Tensor]:
    """One step of SGD, with the mean of what the hook has left of each rank's gradients."""
    model = seeded(two_layers)
    sums: dict[str, torch.Tensor] = {}
    for rank in range(world):
        part = copy.deepcopy(model)
        part[0].bias.register_post_accumulate_grad_hook(hook)
        part(rows(0, rank, 2, 4)).square().mean().backward()
        for name, param in part.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, 0) + param.grad / world
    return {name: param.detach() - 0.1 * sums.get(name, 0) for name, param in model.named_parameters()}


def check_step(model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
    """A step from the first weights on follows torch, where ``hook`` is on the first bias. Collective."""
    model(rows(0, sc.Mesh(device="cpu").rank, 2, 4)).square().mean().backward()
    optimizer.step()
    difference, where = largest_difference(whole_parameters(model), expected(hook, 2))
    assert difference < 1e-6, where


def look(param: nn.Parameter) -> None:
    """Changes nothing."""


@all_stages
@pytest.mark.parametrize("when", ["before", "after", "in_forward", "both"])
@pytest.mark.parametrize("hook", [drop, halve, halve_data, replace])
@spmd(world=2)
def test_what_a_hook_leaves_of_a_gradient_is_what_counts(stage: int, when: str, hook: Hook) -> None:
    mesh = sc.Mesh(device="cpu")
    model = seeded(two_layers)
    seen: list[torch.Tensor | None] = []

    def note(param: nn.Parameter) -> None:
        seen.append(param.grad)

    first = model[0].bias
    if when == "both":
        first.register_post_accumulate_grad_hook(note)
    if when == "before":
        first.register_post_accumulate_grad_hook(hook)
    sc.shard(model, mesh, stage=stage)
    if when in ("after", "both"):
        first.register_post_accumulate_grad_hook(hook)
    if when == "in_forward":
        model[0].register_forward_hook(lambda *_: first.register_post_accumulate_grad_hook(hook) and None)
    first.register_post_accumulate_grad_hook(note)
    check_step(model, sc.optimizer(torch.optim.SGD, model, lr=0.1), hook)
    assert len(seen) == 1 + (when == "both")
    assert (seen[-1] is None) == (hook is drop) or when == "in_forward"


@all_stages
@spmd(world=2)
def test_a_hook_that_was_removed_is_not_called(stage: int) -> None:
    model = seeded(two_layers)
    before = model[0].bias.register_post_accumulate_grad_hook(drop)
    sc.shard(model, stage=stage)
    after = model[0].bias.register_post_accumulate_grad_hook(drop)
    before.remove()
    after.remove()
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    check_step(model, optimizer, look)


@all_stages
@pytest.mark.parametrize("hook", [drop, halve, halve_data, replace])
@spmd(world=2)
def test_a_hook_that_changes_a_further_gradient_of_a_step_is_refused(stage: int, hook: Hook) -> None:
    """In torch it changes the sum with the gradients before, which is elsewhere. What is refused leaves nothing."""
    model = sc.shard(seeded(two_layers), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model(rows(0, 0, 2, 4)).square().mean().backward()
    handle = model[0].bias.register_post_accumulate_grad_hook(hook)
    with pytest.raises(StateError, match=r"hook.*gradient of parameter '0.bias' when the step had earlier ones"):
        model(rows(1, 0, 2, 4)).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    sc.reset_iteration(model)
    check_step(model, optimizer, look)


@all_stages
@spmd(world=2)
def test_a_gradient_that_was_set_is_an_earlier_one(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    bias = model[0].bias
    sc.optimizer(torch.optim.SGD, model, lr=0.1)
    sc.zero.set_full_grad(bias, torch.ones(5))
    bias.register_post_accumulate_grad_hook(halve)
    with pytest.raises(StateError, match=r"hook.*gradient of parameter '0.bias' when the step had earlier ones"):
        model(rows(1, 0, 2, 4)).square().mean().backward()


@all_stages
@spmd(world=2)
def test_zeros_are_no_earlier_gradient(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    model[0].bias.register_post_accumulate_grad_hook(halve)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    model(rows(0, sc.Mesh(device="cpu").rank, 2, 4)).square().mean().backward()
    optimizer.zero_grad(set_to_none=False)
    check_step(model, optimizer, halve)


@spmd(world=2)
def test_gradients_that_somebody_keeps_stay_as_they_are() -> None:
    """Stage 0, where ``param.grad`` shows them: kept over zero_grad, over ``param.grad = None``, and exchanged."""

    def three_layers() -> nn.Module:
        return nn.Sequential(*two_layers(), nn.Linear(3, 3))

    model, alone = sc.shard(seeded(three_layers), stage=0, units=[nn.Linear]), seeded(three_layers)
    for each in (model, alone):
        first, last = each[0].bias, each[1].weight
        each(rows(0, 0, 2, 4)).square().mean().backward()
        kept = first.grad
        each.zero_grad()
        each(rows(1, 0, 2, 4)).square().mean().backward()
        first.grad.add_(kept)
        kept, others = last.grad, each[0].weight.grad
        each[1].zero_grad()
        assert each[0].weight.grad is others or each is model
        last.grad = None
        each(rows(2, 0, 2, 4)).square().mean().backward()
        last.grad = kept
        square = each[1].bias
        square.grad, other = square.grad.flip(0), square.grad
        square.grad.add_(other)
        each[2].bias.grad, square.grad = square.grad, each[2].bias.grad
    a, b = model[0].bias, alone[0].bias
    torch.testing.assert_close(a.grad, b.grad)
    for optimizer in (sc.optimizer(torch.optim.SGD, model, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)):
        optimizer.step()
    assert largest_difference(whole_parameters(model), alone.state_dict())[0] < 1e-6


@all_stages
@spmd(world=2)
def test_a_backward_that_failed_leaves_no_gradient_behind(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)

    def fail(param: nn.Parameter) -> None:
        raise ValueError("not now")

    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: sc.reset_iteration(model)):
        handle = model[0].bias.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError, match="not now"):
            model(rows(1, 0, 2, 4)).square().mean().backward()
        handle.remove()
        clear()
    check_step(model, optimizer, look)


@all_stages
@spmd(world=2)
def test_a_hook_may_look_at_every_gradient(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    norms: list[float] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: norms.append(float(param.grad.norm())))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    for micro in range(3):
        model(rows(micro, 0, 2, 4)).square().mean().backward()
    optimizer.step()
    assert len(norms) == 3 * 4
    assert all(norms)


@all_stages
@spmd(world=2)
def test_a_hook_that_writes_to_its_parameter_is_refused(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    model[1].weight.register_post_accumulate_grad_hook(write)
    with pytest.raises(StateError, match=r"hook.*wrote to parameter '1.weight' during backward"):
        model(rows(0, 0, 2, 4)).square().mean().backward()


@all_stages
@spmd(world=2)
def test_an_optimizer_that_steps_inside_backward_is_refused(stage: int) -> None:
    """At stage 0 it would update by this rank's gradient, before the mean over the ranks."""
    model = sc.shard(seeded(two_layers), stage=stage)
    bias = model[1].bias
    optimizer = torch.optim.SGD([bias], lr=0.1)
    bias.register_post_accumulate_grad_hook(lambda param: optimizer.step())
    with pytest.raises(StateError, match=r"SGD was stepped (inside a backward|, but it holds)"):
        model(rows(0, 0, 2, 4)).square().mean().backward()


@spmd(world=2)
def test_other_memory_for_a_gradient_counts() -> None:
    """``param.grad.data = ...`` where gradients are on the parameters, after backward and between two."""
    model, alone = sc.shard(seeded(two_layers), stage=0), seeded(two_layers)
    for each in (model, alone):
        for micro in range(2):
            each(rows(micro, 0, 2, 4)).square().mean().backward()
            for param in each.parameters():
                param.grad.data = param.grad.data.sign()
    sc.optimizer(torch.optim.SGD, model, lr=0.1).step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert largest_difference(whole_parameters(model), alone.state_dict())[0] < 1e-6


@spmd(world=2)
def test_a_gradient_dropped_between_two_backwards_stays_dropped() -> None:
    """Also where the second backward does not reach the parameter (stage 0)."""
    model, alone = sc.shard(seeded(two_layers), stage=0), seeded(two_layers)
    for each in (model, alone):
        each(rows(0, 0, 2, 4)).square().mean().backward()
        each[0].bias.grad = None
        each(rows(1, 0, 2, 4))[0, 0].mul(0).add(each[1](rows(1, 0, 2, 5)).square().mean()).backward(
            inputs=list(each[1].parameters())
        )
    sc.optimizer(torch.optim.SGD, model, lr=0.1).step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert largest_difference(whole_parameters(model), alone.state_dict())[0] < 1e-6


@all_stages
@spmd(world=2)
def test_a_gradient_set_by_the_hook_of_another_parameter_is_refused(stage: int) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    later, earlier = model[0].bias, model[1].weight

    def set_other(param: nn.Parameter) -> None:
        earlier.grad = torch.ones_like(earlier, device="cpu")

    later.register_post_accumulate_grad_hook(set_other)
    with pytest.raises(StateError, match=r"gradient of parameter '1.weight'"):
        model(rows(0, 0, 2, 4)).square().mean().backward()


@all_stages
@pytest.mark.parametrize("where", ["forward", "summon"])
@spmd(world=2)
def test_a_gradient_set_where_nothing_notices_it_is_refused_or_counts(stage: int, where: str) -> None:
    model = sc.shard(seeded(two_layers), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    model(rows(0, 0, 2, 4)).square().mean().backward()
    bias = model[1].bias
    ones = torch.ones(3)

    def set_it(*_: object) -> None:
        bias.grad = ones.clone()

    refused = pytest.raises(StateError, match=r"gradient of parameter '1.bias'") if stage else nullcontext()
    if where == "summon":
        with sc.summon(model):
            set_it()
        with refused:
            optimizer.step()
    else:
        model[1].register_forward_hook(set_it)
        with refused:
            model(rows(1, 0, 2, 4)).sum().mul(0).backward()
    if not stage:
        torch.testing.assert_close(bias.grad, ones)


@all_stages
@spmd(world=2)
def test_a_gradient_from_before_sharding_is_not_dropped_in_silence(stage: int) -> None:
    model = seeded(two_layers)
    model(rows(1, 0, 2, 4)).square().mean().backward()
    sc.shard(model, stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    with pytest.raises(StateError, match="had a gradient before it was sharded"):
        model(rows(1, 0, 2, 4)).square().mean().backward()
    optimizer.zero_grad()
    check_step(model, optimizer, look)
