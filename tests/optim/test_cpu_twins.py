"""CPU optimizers give what torch's give, and move their states to and from them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardcore as sc
from optim.cpu_twins import RULES, SHAPES, Rule, distance, parameters, set_gradients, train

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
AGREE = 2e-6
"""Both sides round each operation to fp32, in another order: a few units of 6e-8 in each of some tens of steps."""


@each_rule
def test_the_same_training(rule: Rule) -> None:
    ours, theirs = parameters(), parameters()
    train(rule.make(ours), ours, range(30))
    train(rule.twin(theirs), theirs, range(30))
    assert distance(ours, theirs) < AGREE


@pytest.mark.full
@each_rule
def test_2000_steps(rule: Rule) -> None:
    ours, theirs = parameters(), [p.detach().double().requires_grad_() for p in parameters()]
    mine, twin = rule.make(ours), rule.twin(theirs)
    for step in range(2000):
        set_gradients(ours, step)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = a.grad.double() if a.grad is not None else None
        mine.step()
        twin.step()
    assert distance(ours, theirs) < (1e-4 if rule.name == "lion" else 1e-5)  # a sign may turn where it is near zero


@each_rule
@pytest.mark.parametrize("to_torch", [True, False], ids=["to-torch", "from-torch"])
def test_a_state_moves_between_the_two(rule: Rule, to_torch: bool) -> None:
    expected = parameters()
    train(rule.twin(expected), expected, range(8))
    params = parameters()
    first, second = (rule.make, rule.twin) if to_torch else (rule.twin, rule.make)
    before = first(params)
    train(before, params, range(4))
    buffer = io.BytesIO()
    torch.save(before.state_dict(), buffer)
    buffer.seek(0)
    after = second(params)
    after.load_state_dict(torch.load(buffer, weights_only=True))
    train(after, params, range(4, 8))
    assert distance(params, expected) < AGREE


@each_rule
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_then_load_changes_no_bit(rule: Rule, state_dtype: str, dtype: torch.dtype) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return rule.make(params, state_dtype=state_dtype, seed=5)

    whole, parts = parameters(dtype=dtype), parameters(dtype=dtype)
    train(make(whole), whole, range(6))
    before = make(parts)
    train(before, parts, range(3))
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in parts]
    after = make(resumed)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(after, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@given(
    rule=st.sampled_from(RULES),
    shapes=st.lists(st.sampled_from([*SHAPES, (3, 1, 2), (1023,), (20_011,)]), min_size=1, max_size=12),
    num_threads=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    state_dtype=st.sampled_from(["fp32", "bf16"]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_neither_threads_nor_company_change_a_bit(
    rule: Rule, shapes: list[tuple[int, ...]], num_threads: int, dtype: torch.dtype, state_dtype: str
) -> None:
    together, alone = parameters(shapes, dtype=dtype), parameters(shapes, dtype=dtype)
    train(rule.make(together, num_threads=num_threads, state_dtype=state_dtype), together, range(3))
    groups = [{"params": [p]} for p in alone]  # parameters keep their numbers, which key stochastic rounding
    train(rule.make(groups, num_threads=1, state_dtype=state_dtype), alone, range(3))
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_groups_have_options_of_their_own_and_schedulers_move_them() -> None:
    both = []
    for cls in (sc.optim.CPUAdamW, torch.optim.AdamW):
        params = parameters()
        optimizer = cls([{"params": params[:3], "lr": 1e-3}, {"params": params[3:], "weight_decay": 0.3}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=20)
        for step in range(10):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
        both.append(params)
    assert distance(*both) < AGREE


def test_a_parameter_without_gradient_is_left_alone() -> None:
    both = []
    for cls in (sc.optim.CPUAdamW, torch.optim.AdamW):
        params = parameters()
        optimizer = cls(params, lr=1e-2)
        for step in range(6):
            set_gradients(params, step)
            params[step].grad = None
            optimizer.step()
        both.append(params)
    assert distance(*both) < AGREE


def test_a_closure_and_a_tensor_as_learning_rate() -> None:
    both = []
    for cls in (sc.optim.CPUSGD, torch.optim.SGD):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = cls([param], lr=torch.tensor(0.1))

        def loss(param: torch.Tensor = param, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            value = param.square().sum()
            value.backward()
            return value

        assert optimizer.step(loss).item() == 5.0
        both.append([param])
    assert distance(*both) < AGREE


def test_sharded_over_a_cpu_optimizer() -> None:
    def run(cls: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        sc.shard(model, stage=2)
        optimizer = sc.optimizer(cls, model, lr=1e-2)
        for _ in range(5):
            model(torch.ones(3, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert distance(run(sc.optim.CPUAdamW), run(torch.optim.AdamW)) < AGREE
