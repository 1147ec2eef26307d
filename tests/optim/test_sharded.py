"""What a sharded optimizer refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.testing import spmd
from zero.following import rows, seeded
from zero.twin import whole_parameters


def model(stage: int) -> nn.Module:
    return sc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), stage=stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_b29_a_torch_optimizer_over_sharded_parameters_trains_nothing_and_says_so(stage: int) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = torch.optim.SGD(plain.parameters(), lr=0.1)
    sharded = sc.shard(plain, stage=stage)
    sharded(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match=r"shardcore\.optimizer"):
        before.step()
    ours = sc.optimizer(before, sharded)
    ours.step()
    ours.zero_grad()
    sharded(torch.ones(2, 4)).sum().backward()
    before.step()  # taken over, so it is the sharded one now


@pytest.mark.parametrize("stage", [0, 1, 2])
@spmd(world=2)
def test_replaced_data_are_noticed(stage: int) -> None:
    sharded = model(stage)
    optim = sc.optimizer("sgd", sharded, lr=0.1)
    sharded(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match=r"0\.weight"):
        sharded[0].weight.data = torch.ones(4, 4)
    optim.step()
    sharded[1].register_forward_pre_hook(lambda module, args: setattr(sharded[0].weight, "data", torch.ones(4, 4)))
    sharded(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match=r"0\.weight"):
        optim.step()  # where it was replaced during a pass


@spmd(world=2)
def test_data_replaced_while_summoned_are_noticed() -> None:
    sharded = model(3)
    with pytest.raises(StateError, match=r"1\.bias"), sc.summon(sharded, writeback=True):
        sharded[1].bias.data = torch.ones(2)


@spmd(world=1)
def test_groups_are_fixed() -> None:
    sharded = model(2)
    optim = sc.optimizer("adamw", sharded, lr=0.1)
    with pytest.raises(StateError, match="cannot be added"):
        optim.add_param_group({"params": []})
    optim.param_groups.append({"params": []})
    sharded(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match="cannot be added"):
        optim.step()


def test_missing_names_are_explained() -> None:
    with pytest.raises(AttributeError, match="does not offer 'moe' yet"):
        _ = deepspeed.moe


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_a_torch_optimizer_over_sharded_parameters_among_others_says_so_too(stage: int) -> None:
    sharded, head = model(stage), nn.Linear(2, 1)
    plain = torch.optim.SGD([*head.parameters(), *sharded.parameters()], lr=0.1)
    head(sharded(torch.ones(2, 4))).sum().backward()
    with pytest.raises(StateError, match=r"'0\.weight'.*shardcore\.optimizer"):
        plain.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
@spmd(world=2)
def test_ddp_around_a_sharded_model_is_refused(stage: int) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model(stage))
    with pytest.raises(StateError, match="DistributedDataParallel around"):
        wrapped(torch.ones(2, 4))


class NormSGD(torch.optim.Optimizer):
    """Steps along the gradient of all parameters together, made one long."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for param in params:
            param.data.sub_(self.param_groups[0]["lr"] * param.grad / norm)


@spmd(world=1)
def test_optimizers_whose_parameters_depend_on_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"depends on the others.*max_grad_norm"):
        sc.optimizer(NormSGD, model(1))
    with pytest.raises(ConfigError, match="differentiable=True"):
        sc.optimizer("sgd", model(1), lr=0.1, differentiable=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@spmd(world=2)
def test_gradients_that_are_not_cleared_keep_one_scale(stage: int, clip: float | None) -> None:
    """The loop that forgets ``zero_grad``, under a loss scale, is the plain one without."""
    plain, scaled = seeded(lambda: nn.Linear(4, 3)), seeded(lambda: nn.Linear(4, 3))
    sc.shard(scaled, stage=stage, precision=sc.Precision(loss_scale=128.0))
    optimizers = (torch.optim.SGD(plain.parameters(), lr=0.1), sc.optimizer("sgd", scaled, lr=0.1, max_grad_norm=clip))
    for step in range(4):
        for each, optimizer in zip((plain, scaled), optimizers, strict=True):
            each(rows(step, 0, 5, 4)).square().mean().backward()
            if clip is not None and each is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            if step == 1:
                optimizer.step()  # with the same gradients
    for name, value in whole_parameters(scaled).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 3])
@spmd(world=2)
def test_rates_that_come_to_differ_between_ranks_are_an_error_in_the_next_step(stage: int) -> None:
    sharded = model(stage)
    optim = sc.optimizer("sgd", sharded, lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, patience=0, factor=0.1)
    rank = sc.Mesh().rank
    for step in range(2):
        sharded(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
        schedule.step(1.0 if rank else 1.0 - step)
    sharded(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RankMismatchError, match=r"lr of group 0=0\.01"):
        optim.step()


@pytest.mark.parametrize("stage", [0, 1, 3])
@spmd(world=1)
def test_a_copy_of_a_sharded_optimizer_is_refused(stage: int) -> None:
    optim = sc.optimizer("sgd", model(stage), lr=0.1)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="neither copied nor pickled"):
            copied(optim)
