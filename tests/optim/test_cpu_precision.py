"""16-bit parameters and gradients, masters, 16-bit copies, states in fewer bytes, scaling and clipping."""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from optim.cpu_twins import RULES, Rule, distance, parameters, set_gradients, train

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_16_bit_parameter_is_its_rounded_fp32_twin(rule: Rule, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    mine, twin = rule.make(params), rule.make(twins)
    for step in range(10):
        set_gradients(params, step)
        for a, b in zip(params, twins, strict=True):
            b.grad = a.grad.float() if a.grad is not None else None
        mine.step()
        twin.step()
    for a, b in zip(params, twins, strict=True):
        assert torch.equal(mine.state[a]["master"], b)
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_split_masters_are_fp32_masters_bit_for_bit(rule: Rule) -> None:
    whole, split = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    with_master, with_rest = rule.make(whole), rule.make(split, master="split")
    train(with_master, whole, range(10))
    train(with_rest, split, range(10))
    for a, b in zip(whole, split, strict=True):
        bits = (b.view(torch.int16).int() << 16) + with_rest.state[b]["remainder"].int()
        assert torch.equal(bits.view(torch.float32), with_master.state[a]["master"])
        assert "master" not in with_rest.state[b]


@pytest.mark.parametrize("target_dtype", HALVES, ids=str)
def test_a_copy_is_written_in_the_same_step(target_dtype: torch.dtype) -> None:
    params = parameters()
    copies = [torch.zeros(p.shape, dtype=target_dtype) for p in params]
    optimizer = sc.optim.CPUAdamW(params, lr=1e-2)
    for param, target in zip(params, copies, strict=True):
        optimizer.copy_to(param, target)
    train(optimizer, params, range(3))
    assert all(torch.equal(p.to(target_dtype), target) for p, target in zip(params, copies, strict=True))
    last = [target.clone() for target in copies]
    for param in params:
        optimizer.copy_to(param, None)
    train(optimizer, params, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(last, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_gradients_of_any_type_scaled_in_the_same_pass(dtype: torch.dtype) -> None:
    params, twins = parameters(), parameters()
    mine, twin = sc.optim.CPUAdamW(params, lr=1e-2), sc.optim.CPUAdamW(twins, lr=1e-2)
    for step in range(5):
        set_gradients(twins, step)
        grads = {p: (1024 * t.grad).to(dtype) for p, t in zip(params, twins, strict=True) if t.grad is not None}
        for p, t in zip(params, twins, strict=True):
            t.grad = grads[p].float() / 1024
        mine.step(grads=grads, grad_scale=1 / 1024)
        twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6])
def test_clipping_is_torchs(max_grad_norm: float) -> None:
    params, twins = parameters(), parameters()
    mine, twin = sc.optim.CPUSGD(params, lr=0.1), torch.optim.SGD(twins, lr=0.1)
    for step in range(3):
        set_gradients(params, step, scale=4.0)
        before = [p.grad.clone() for p in params if p.grad is not None]
        set_gradients(twins, step)
        expected = torch.nn.utils.clip_grad_norm_(twins, max_grad_norm)
        twin.step()
        mine.step(grad_scale=0.25, max_grad_norm=max_grad_norm)
        assert mine.grad_norm == pytest.approx(float(expected), rel=1e-5)
        assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True))
    assert distance(params, twins) < 1e-6


def test_the_norm_is_exact_and_the_same_for_any_number_of_threads() -> None:
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (0, 1, 1000, 300_001)]
    grads += [grads[-1].bfloat16(), grads[-1].half()]
    norms = {sc.optim.cpu_norm(grads, num_threads=n) for n in (1, 2, 3)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(sum(float(g.double().square().sum()) for g in grads) ** 0.5, rel=1e-12)
    assert sc.optim.cpu_norm([torch.tensor([1.0, float("inf")])]) == float("inf")
    assert sc.optim.cpu_norm([torch.full((10,), 3e38)]) < float("inf")


def steady(state_dtype: str, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(second moment, parameter) after gradients that fall and have noise."""
    param = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = sc.optim.CPUAdamW([param], lr=1e-3, weight_decay=0.0, state_dtype=state_dtype)
    generator = torch.Generator().manual_seed(3)
    for step in range(num_steps):
        param.grad = (1.0 + 0.5 * torch.randn(param.shape, generator=generator)) / (1 + step / 50)
        optimizer.step()
    return optimizer.state[param]["exp_avg_sq"].float(), param.detach()


@pytest.mark.parametrize("num_steps", [400, pytest.param(4000, marks=pytest.mark.full)])
def test_bf16_states_have_no_bias(num_steps: int) -> None:
    (v, p), (v_twin, p_twin) = steady("bf16", num_steps), steady("fp32", num_steps)
    assert float((v / v_twin).mean()) == pytest.approx(1.0, abs=3e-3)
    assert float((p - p_twin).norm() / p_twin.norm()) < 0.03


def test_bf16_states_take_half_the_bytes() -> None:
    param = torch.nn.Parameter(torch.ones(100))
    for rule in RULES:
        optimizer = rule.make([param], state_dtype="bf16")
        train(optimizer, [param], range(1))
        states = {name: t.dtype for name, t in optimizer.state[param].items() if name != "step"}
        assert set(states.values()) <= {torch.bfloat16}, states


def test_seeds_make_other_roundings() -> None:
    found = []
    for seed in (0, 0, 1):
        params = parameters()
        optimizer = sc.optim.CPUAdamW(params, state_dtype="bf16", seed=seed)
        train(optimizer, params, range(3))
        found.append(optimizer.state[params[-1]]["exp_avg_sq"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("when", ["before the first step", "between steps"])
def test_a_16_bit_parameter_set_by_hand_becomes_its_master(when: str) -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = sc.optim.CPUSGD([param], lr=2**-12)
    if when == "between steps":
        param.grad = torch.ones_like(param)
        optimizer.step()
    with torch.no_grad():
        param[1] = 8.0
    kept = 1.0 - 2**-12 if when == "between steps" else 1.0
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.state[param]["master"].tolist() == [kept, 8.0, kept]


def test_weights_loaded_before_or_after_the_state_resume_bit_for_bit() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = sc.optim.CPUAdamW(params, lr=1e-3)
    train(optimizer, params, range(3))
    saved, weights = optimizer.state_dict(), [p.detach().clone() for p in params]
    saved = {**saved, "state": {k: {n: t.clone() for n, t in s.items()} for k, s in saved["state"].items()}}
    train(optimizer, params, range(3, 6))
    for state_first in (True, False):
        fresh = parameters(dtype=torch.bfloat16, seed=9)
        resumed = sc.optim.CPUAdamW(fresh)
        if state_first:
            resumed.load_state_dict(saved)
        with torch.no_grad():
            for p, w in zip(fresh, weights, strict=True):
                p.copy_(w)
        if not state_first:
            resumed.load_state_dict(saved)
        train(resumed, fresh, range(3, 6))
        assert all(torch.equal(a, b) for a, b in zip(params, fresh, strict=True)), state_first
