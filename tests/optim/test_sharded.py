"""What a sharded optimizer refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.errors import StateError
from shardcore.testing import spmd


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
    with pytest.raises(AttributeError, match="does not offer 'comm' yet"):
        _ = deepspeed.comm


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
