"""Masters, gradients and optimizer states of single parameters, against the unsharded twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.deepspeed import utils
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.following import rows
from zero.models import Perceptron, Vector
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
cells = pytest.mark.parametrize(
    ("stage", "precision"),
    [(s, p) for p in ("fp32", "bf16") for s in range(4)] + [(0, "fp16"), (2, "fp16"), (3, "fp16")],
)


class Mixed(Perceptron):
    """Odd sizes, fewer elements than ranks, none at all, a frozen block and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(5))


def build(stage: int, precision: str = "fp32", cls: type[nn.Module] = Mixed) -> nn.Module:
    torch.manual_seed(1)
    return sc.shard(cls(), stage=stage, precision=sc.Precision(param=precision, loss_scale=8.0))


def backward(model: nn.Module, step: int = 0) -> None:
    root: Any = find_root(model)
    x = rows(step, root.data_axis.rank, 4, 7)
    model(x).float().square().mean().backward()


def twin(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain model after ``steps`` updates, with the gradients of the next step."""
    torch.manual_seed(1)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(steps + 1):
        optimizer.zero_grad()
        for rank in range(2):
            (model(rows(step, rank, 4, 7)).square().mean() / 2).backward()
        if step < steps:
            optimizer.step()
    return model, optimizer


@cells
@spmd(world=2)
def test_values_are_the_twins(stage: int, precision: str) -> None:
    model = build(stage, precision)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2, eps=1e-3)
    for name, param in model.named_parameters():
        assert utils.safe_get_full_optimizer_state(param, "exp_avg") is None, name
        assert utils.safe_get_full_grad(param) is None, name
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, 2)
    alone, plain = twin(2)
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.1, "atol": 0.05}
    for name, param in model.named_parameters():
        expected = alone.get_parameter(name)
        found = utils.safe_get_full_fp32_param(param)
        grad = utils.safe_get_full_grad(param)
        moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
        if not param.requires_grad:
            assert found is grad is moment is None
            continue
        assert found is not None
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.detach(), **close)
        if name == "spare":
            assert grad is moment is None
            continue
        assert grad is not None
        if not param.numel():
            continue
        assert moment is not None
        assert (grad.shape, moment.shape) == (param.shape, param.shape)
        torch.testing.assert_close(grad, expected.grad, **close)
        torch.testing.assert_close(moment, plain.state[expected]["exp_avg"], **close)
        for key in ("exp_avg_sq", "step"):
            state = utils.safe_get_full_optimizer_state(param, key)
            assert state is not None
            torch.testing.assert_close(state, plain.state[expected][key], **close)


@cells
@spmd(world=2)
def test_what_is_set_reaches_every_copy(stage: int, precision: str) -> None:
    check_what_is_set_reaches_every_copy(stage, precision)


@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=4)
def test_what_is_set_reaches_every_copy_on_ranks_without_a_piece(stage: int) -> None:
    check_what_is_set_reaches_every_copy(stage, "bf16")


def check_what_is_set_reaches_every_copy(stage: int, precision: str) -> None:
    model = build(stage, precision)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    before = whole_parameters(model)
    for index, (name, param) in enumerate(model.named_parameters()):
        if not param.requires_grad or name == "spare":
            continue
        value = torch.linspace(-1, 1, param.numel()).reshape(param.shape) + 1e-4 + index
        utils.safe_set_full_fp32_param(param, value)
        utils.safe_set_full_grad(param, 2 * value)
        utils.safe_set_full_optimizer_state(param, 3 * value, "exp_avg")
        master, grad = utils.safe_get_full_fp32_param(param), utils.safe_get_full_grad(param)
        assert master is not None
        assert torch.equal(master, value)
        torch.testing.assert_close(grad, 2 * value, rtol=1e-6, atol=0)
        if param.numel():
            moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
            torch.testing.assert_close(moment, 3 * value, rtol=0, atol=0)
        assert torch.equal(whole_parameters(model)[name], value.to(param.dtype)), "rule 8: the 16-bit copy follows"
        before[name] = value.to(param.dtype)
    after = whole_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert_same_on_all_ranks(model)


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_local_pieces(stage: int, precision: str) -> None:
    model = build(stage, precision)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert utils.safe_get_local_fp32_param(param) is None
            continue
        piece, start, stop = sc.local_shard(param)
        master = utils.safe_get_local_fp32_param(param)
        assert master is not None
        assert master.numel() == stop - start == piece.numel()
        full = utils.safe_get_full_grad(param)
        grad = utils.safe_get_local_grad(param)
        if name == "spare":
            assert full is grad is None
            continue
        if param.numel():
            assert full is not None
            assert grad is not None
            assert torch.equal(grad, full.reshape(-1)[start:stop])
            utils.safe_set_local_grad(param, grad + 1)
            torch.testing.assert_close(utils.safe_get_full_grad(param), full + 1)
        utils.safe_set_local_fp32_param(param, master + 1)
        moment = utils.safe_get_local_optimizer_state(param, "exp_avg")
        if moment is not None:
            utils.safe_set_local_optimizer_state(param, moment + 1, "exp_avg")
            found = utils.safe_get_local_optimizer_state(param, "exp_avg")
            assert found is not None
            assert torch.equal(found, moment + 1)
        found = utils.safe_get_local_fp32_param(param)
        assert found is not None
        assert torch.equal(found, master + 1)
        assert torch.equal(sc.local_shard(param)[0], (master + 1).to(param.dtype))
    assert_same_on_all_ranks(model)


def assert_same_on_all_ranks(model: nn.Module) -> None:
    root: Any = find_root(model)
    prints = {name: sc.comm.fingerprint(value) for name, value in whole_parameters(model).items()}
    everywhere = sc.comm.exchange(prints, root.data_axis, "test")
    assert all(theirs == everywhere[0] for theirs in everywhere)


@all_stages
@pytest.mark.parametrize("accumulation", [1, 3])
@spmd(world=2)
def test_looking_at_gradients_changes_nothing(stage: int, accumulation: int) -> None:
    """Also in mid-window, and inside no_sync; to the last bit where each backward reduces anyway."""
    results = []
    for looks in (False, True):
        model = build(stage)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2, max_grad_norm=0.5)
        for step in range(3):
            for micro in range(accumulation):
                backward(model, 10 * step + micro)
                if looks:
                    for param in model.parameters():
                        utils.safe_get_full_grad(param)
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole_parameters(model))
    exact = stage != 1 or accumulation == 1
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=0 if exact else 1e-6)


@all_stages
@spmd(world=2)
def test_gradients_that_were_set_are_what_the_step_takes(stage: int) -> None:
    """Gradient (3, 4) clipped to 1, where the backward gave another; unscaled and clipped after the step."""
    torch.manual_seed(1)
    model = sc.shard(Vector(), stage=stage, precision=sc.Precision(loss_scale=128.0))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0, max_grad_norm=1.0)
    model(torch.tensor([[7.0, 7.0]])).mean().backward()
    torch.testing.assert_close(utils.safe_get_full_grad(model.weight), torch.tensor([7.0, 7.0]))
    utils.safe_update_full_grad_vectorized([model.weight], lambda grad, param: grad - torch.tensor([4.0, 3.0]))
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(5.0)
    torch.testing.assert_close(utils.safe_get_full_grad(model.weight), torch.tensor([0.6, 0.8]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        utils.safe_get_full_fp32_param(model.weight), torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=1e-6
    )
    optimizer.zero_grad()
    assert utils.safe_get_full_grad(model.weight) is None


@all_stages
@spmd(world=2)
def test_wrong_values_are_refused_on_every_rank_and_change_nothing(stage: int) -> None:
    model = build(stage)
    rank = sc.Mesh().rank
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
    weight = model.head.weight
    with pytest.raises(StateError, match="before its first update"):
        utils.safe_set_full_optimizer_state(weight, torch.zeros(3, 7), "exp_avg")
    backward(model)
    optimizer.step()
    before = whole_parameters(model)
    for setter in (utils.safe_set_full_fp32_param, utils.safe_set_full_grad):
        with pytest.raises(ConfigError, match=r"'head\.weight' takes shape \(3, 7\)"):
            setter(weight, torch.zeros(7, 3) if rank == 1 else torch.zeros(3, 7))
        with pytest.raises(ConfigError, match="floating"):
            setter(weight, torch.zeros(3, 7, dtype=torch.int64))
        with pytest.raises(RankMismatchError, match="different values"):
            setter(weight, torch.full((3, 7), float(rank)))
        with pytest.raises(StateError, match="frozen"):
            setter(model.blocks[1].up.bias, torch.zeros(13))
        with pytest.raises(ConfigError, match="sharded module"):
            setter(torch.nn.Parameter(torch.zeros(2)), torch.zeros(2))
    with pytest.raises(ConfigError, match=r"no state 'exp_average'; it has exp_avg, exp_avg_sq, step"):
        utils.safe_get_full_optimizer_state(weight, "exp_average")
    with pytest.raises(RankMismatchError, match="different values"):
        utils.safe_set_full_optimizer_state(weight, torch.full((3, 7), float(rank)), "exp_avg")
    with pytest.raises(ConfigError, match="piece"):
        utils.safe_set_local_fp32_param(weight, torch.zeros(100))
    after = whole_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


@all_stages
@spmd(world=2)
def test_one_parameters_step_count_is_its_own(stage: int) -> None:
    model = build(stage)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
    backward(model)
    optimizer.step()
    utils.safe_set_full_optimizer_state(model.head.weight, torch.tensor(7.0), "step")
    steps = {n: utils.safe_get_full_optimizer_state(p, "step") for n, p in model.named_parameters() if p.numel()}
    assert {name: float(step) for name, step in steps.items() if step is not None} == {
        name: 7.0 if name == "head.weight" else 1.0
        for name, param in model.named_parameters()
        if param.requires_grad and param.numel() and name != "spare"
    }


@all_stages
@spmd(world=2)
def test_setting_between_forward_and_backward_is_noticed(stage: int) -> None:
    """As in torch: the graph has saved the weight that was there."""
    model = build(stage)
    loss = model(rows(0, 0, 4, 7)).square().mean()
    sc.zero.set_full_master(model.head.weight, torch.ones(3, 7))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    sc.reset_iteration(model)
