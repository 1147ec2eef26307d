"""The loss scale and 1/accumulation enter once on every way from the loss to a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore.errors import StateError
from shardcore.testing import spmd
from zero.following import rows
from zero.twin import largest_difference, whole_parameters

Loss = Callable[[list[nn.Module], torch.Tensor], torch.Tensor]

SCALE = 2.0**7
all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def plain(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return models[0](x).square().mean()


def twice(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return models[0](models[0](x)).square().mean()


def behind(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The first model's output is used by the second, and beside it, as generators are trained."""
    made = models[0](x)
    return models[1](torch.cat([x, 2 * made])).square().mean() + (made - x).abs().mean()


def penalty(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return plain(models, x) + 0.5 * sum(p.square().sum() for p in models[0].parameters())


def penalty_alone(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return sum(p.square().sum() for p in models[0].parameters()) * x.square().mean()


def parts(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return models[0][2](models[0][0](x).tanh()).square().mean()  # type: ignore[index]


def recomputed(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(models[0], x.requires_grad_(), use_reentrant=False).square().mean()


def recomputed_in_backward(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(models[0], x.requires_grad_(), use_reentrant=True).square().mean()


WHOLE = (penalty, penalty_alone)
"""Losses that read parameters outside the model, which stage 3 refuses."""
LOSSES = [plain, twice, behind, penalty, penalty_alone, parts, recomputed, recomputed_in_backward]


def follow(loss: Loss, models: list[nn.Module], optimizers: list[Any], mesh: sc.Mesh) -> None:
    """Two steps of ``models`` against their unsharded twins."""
    twins = [model_of(seed) for seed in range(len(models))]
    alone = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.1)
    for step in range(2):
        loss(models, rows(step, mesh.rank, 3, 5)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for rank in range(mesh.world):
            (loss(twins, rows(step, rank, 3, 5)) / mesh.world).backward()
        alone.step()
        alone.zero_grad()
    for model, twin in zip(models, twins, strict=True):
        expected = {name: p.detach() for name, p in twin.named_parameters()}
        off, where = largest_difference(whole_parameters(model), expected)
        assert off <= 1e-6, f"{loss.__name__}: {where} is off by {off:g}"


@all_stages
@spmd(world=2)
def test_every_way_to_a_parameter_is_scaled_once(stage: int) -> None:
    mesh = sc.Mesh(device="cpu")
    for loss in LOSSES:
        if stage < 3 or loss not in WHOLE:
            models = [model_of(0), model_of(1)] if loss is behind else [model_of(0)]
            for model in models:
                sc.shard(model, mesh, stage=stage, precision=sc.Precision(loss_scale=SCALE))
            follow(loss, models, [sc.optimizer(torch.optim.SGD, models, lr=0.1)], mesh)


@all_stages
@spmd(world=2)
def test_models_of_different_scales_correct_what_arrives(stage: int) -> None:
    """As two optimizers come to have after different overflows; the factor of the loss is that of one of them."""
    mesh = sc.Mesh(device="cpu")
    for scales in ([SCALE, 8.0], [8.0, SCALE], [None, SCALE], [SCALE, None]):
        models = [model_of(0), model_of(1)]
        optimizers = []
        for model, scale in zip(models, scales, strict=True):
            sc.shard(model, mesh, stage=stage, precision=sc.Precision(loss_scale=scale))
            optimizers.append(sc.optimizer(torch.optim.SGD, model, lr=0.1))
        follow(behind, models, optimizers, mesh)


@spmd(world=2)
def test_what_cannot_be_corrected_is_refused_in_step() -> None:
    """At stage 0 autograd itself adds to a gradient that is shown, where a backward comes to it by no output."""

    def all_weights() -> torch.Tensor:
        return sum(param.square().sum() for model in models for param in model.parameters())  # type: ignore[return-value]

    models = [model_of(0), model_of(1)]
    optimizers = []
    for model, scale in zip(models, (SCALE, 8.0), strict=True):
        sc.shard(model, stage=0, precision=sc.Precision(loss_scale=scale))
        optimizers.append(sc.optimizer(torch.optim.SGD, model, lr=0.1))
    for _ in range(2):
        all_weights().backward()
    optimizers[1].step()
    with pytest.raises(StateError, match=r"gradient of '.*' was added up with the wrong one.*one optimizer"):
        optimizers[0].step()
    optimizers[0].zero_grad()
    all_weights().backward()
    optimizers[0].step()


@all_stages
@spmd(world=2)
def test_models_of_different_scales_correct_what_is_added(stage: int) -> None:
    models, alone = [model_of(0), model_of(1)], [model_of(0), model_of(1)]
    optimizers: list[torch.optim.Optimizer] = []
    for model, scale in zip(models, (SCALE, 8.0), strict=True):
        sc.shard(model, stage=stage, precision=sc.Precision(loss_scale=scale))
        optimizers.append(sc.optimizer(torch.optim.SGD, model, lr=0.1))
    optimizers += [torch.optim.SGD(model.parameters(), lr=0.1) for model in alone]
    for first, last in (models, alone):
        for _ in range(2):
            last(first(rows(0, 0, 3, 5))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    for model, plain_model in zip(models, alone, strict=True):
        assert largest_difference(whole_parameters(model), plain_model.state_dict())[0] < 1e-6


@spmd(world=2)
def test_models_hidden_behind_one_another_are_refused() -> None:
    model = sc.shard(model_of(0), stage=2, precision=sc.Precision(loss_scale=SCALE))
    sc.optimizer(torch.optim.SGD, model, lr=0.1)
    x = rows(0, 0, 3, 5).requires_grad_()
    made = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(StateError, match="hidden inside reentrant checkpoints"):
        made.mean().backward()


@spmd(world=2)
def test_other_models_of_the_process_are_left_alone() -> None:
    model = sc.shard(model_of(0), stage=2, precision=sc.Precision(loss_scale=SCALE))
    sc.optimizer(torch.optim.SGD, model, lr=0.1)
    other = nn.Linear(5, 1)
    other(torch.ones(1, 5)).sum().backward()
    assert other.bias.grad is not None
    assert other.bias.grad.item() == 1.0
    x = rows(0, 0, 3, 5).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    (expected,) = torch.autograd.grad(model_of(0)(x).sum(), x)
    assert torch.allclose(grad, expected, atol=1e-6)
