"""What a CPU optimizer refuses, with the reason, and what it bears."""

from __future__ import annotations

import copy
import gc
import os
import threading
from typing import Any

import pytest
import torch

import shardcore as sc
from optim.cpu_twins import distance, parameters, set_gradients, train
from shardcore import _core
from shardcore.errors import CheckpointError, ConfigError


def param(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"differentiable": True}, "differentiable"),
        ({"capturable": True}, "capturable"),
        ({"lr": -1.0}, "lr is -1"),
        ({"lr": float("nan")}, "lr is NaN"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"state_dtype": "fp16"}, "state_dtype='fp16'"),
        ({"master": "none"}, "master='none'"),
        ({"state_dtype": "bf16", "rounding": "nearest"}, "stops following the gradients"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sc.optim.CPUAdamW([param(2)], **options)


def test_other_options() -> None:
    with pytest.raises(ConfigError, match="nesterov"):
        sc.optim.CPUSGD([param(2)], nesterov=True)
    with pytest.raises(TypeError, match="stat_dtype"):
        sc.optim.CPULion([param(2)], stat_dtype="bf16")
    with pytest.raises(ValueError, match="empty"):
        sc.optim.CPUAdamW([])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: param(2, dtype=torch.float64), "float64"),
        (lambda: torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)), "complex64"),
        (lambda: torch.nn.Parameter(torch.ones(2, device="meta")), "meta"),
    ],
)
def test_parameters(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sc.optim.CPUAdamW([param(2), wrong()])
    optimizer = sc.optim.CPUAdamW([param(2)])
    with pytest.raises(ConfigError, match=message):
        optimizer.add_param_group({"params": [wrong()]})
    assert len(optimizer.param_groups) == 1


def test_fp16_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="float16"):
        sc.optim.CPUAdamW([param(2, dtype=torch.float16)], master="split")


def test_a_sparse_gradient() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = sc.optim.CPUAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"dense .*sparse_coo"):
        optimizer.step()
    assert float(optimizer.state[embedding.weight]["step"]) == 0


def test_a_gradient_of_another_length() -> None:
    p = param(3)
    with pytest.raises(ConfigError, match="gradient has 4 elements, the parameter 3"):
        sc.optim.CPUAdamW([p]).step(grads={p: torch.ones(4)})


def test_memory_used_twice() -> None:
    base = torch.ones(6)
    first, second = torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])
    with pytest.raises(ConfigError, match="share memory"):
        train(sc.optim.CPUSGD([first, second], lr=0.1), [first, second], range(1))
    p = param(4)
    with pytest.raises(ConfigError, match="share memory"):
        sc.optim.CPUSGD([p], lr=0.1).step(grads={p: p.detach()})


def test_states_of_other_optimizers() -> None:
    def saved(cls: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
        p = param(3)
        optimizer = cls([p], lr=0.1, **options)
        train(optimizer, [p], range(1))
        return optimizer.state_dict()

    ours = sc.optim.CPUAdamW([param(3)])
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        ours.load_state_dict(saved(torch.optim.SGD, momentum=0.9))
    with pytest.raises(ConfigError, match="amsgrad"):
        ours.load_state_dict(saved(torch.optim.AdamW, amsgrad=True))
    with pytest.raises(CheckpointError, match="shape"):
        sc.optim.CPUAdamW([param(4)]).load_state_dict(saved(torch.optim.AdamW))


def test_copies_that_do_not_fit() -> None:
    p, half = param(3), param(3, dtype=torch.bfloat16)
    optimizer = sc.optim.CPUAdamW([p, half])
    with pytest.raises(ConfigError, match="its own copy"):
        optimizer.copy_to(half, torch.zeros(3, dtype=torch.bfloat16))
    for target in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3)):
        with pytest.raises(ConfigError, match="expected a bf16 or fp16 target"):
            optimizer.copy_to(p, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    both = []
    for transposed in (True, False):
        values = torch.linspace(-1, 1, 35).view(5, 7).to(dtype)
        p = torch.nn.Parameter(values.t().contiguous().t() if transposed else values)
        assert p.is_contiguous() is not transposed
        optimizer = sc.optim.CPUAdamW([p], lr=1e-2)
        for step in range(4):
            set_gradients([p], step)
            if p.grad is not None and step % 2:
                p.grad = p.grad.t().contiguous().t()
            optimizer.step()
        both.append(p.detach())
    assert torch.equal(*both)


def test_tensors_that_move_between_steps() -> None:
    params, twins = parameters(), parameters()
    ours, theirs = sc.optim.CPUAdamW(params, lr=1e-2), torch.optim.AdamW(twins, lr=1e-2)
    for step in range(6):
        train(ours, params, [step])
        train(theirs, twins, [step])
        for p in params:
            p.data = p.data.clone()
        if step == 3:
            state = ours.state[params[0]]
            state["exp_avg"] = state["exp_avg"].clone()
        gc.collect()
    assert distance(params, twins) < 1e-6


def test_autograd_knows_of_the_step() -> None:
    p = param(3)
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    sc.optim.CPUSGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copied_optimizer_goes_its_own_way() -> None:
    params = parameters()
    optimizer = sc.optim.CPUAdamW(params, lr=1e-2)
    train(optimizer, params, range(2))
    twin_params, twin = copy.deepcopy((params, optimizer))
    train(optimizer, params, range(2, 4))
    train(twin, twin_params, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


def test_the_gil_is_free_during_a_step() -> None:
    p = torch.nn.Parameter(torch.ones(4_000_000))
    p.grad = torch.ones_like(p)
    optimizer = sc.optim.CPUAdamW([p], num_threads=1)
    optimizer.step()
    ticks, done = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        # Nothing but the update itself: what comes before and after it in Python lets other threads run too.
        row = (0, 0, torch.zeros(()), p, None, torch.zeros_like(p), torch.zeros_like(p), None)
        table, rules = _core.CPUStepTable([row]), [optimizer.rule(optimizer.param_groups[0])]
        grads = [p.grad]
        before = ticks
        for _ in range(20):
            table.step(grads, rules, seeds=[0])
        assert ticks > before, "no other thread ran during the step"
    finally:
        done.set()
        counter.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_after_a_step_has_threads_of_its_own() -> None:
    p = torch.nn.Parameter(torch.ones(300_000))
    p.grad = torch.ones_like(p)
    optimizer = sc.optim.CPUAdamW([p], num_threads=2)
    optimizer.step()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
            os.write(writer, b"stepped")
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 16) == b"stepped"
    os.waitpid(child, 0)
    os.close(reader)


def test_conversions() -> None:
    source = torch.randn(5_000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        target = torch.zeros(5_000, dtype=dtype)
        _core.convert([source], [target], num_threads=2)
        assert torch.equal(target, source.to(dtype))
        back = torch.zeros(5_000)
        _core.convert([target], [back], scale=2.0)
        assert torch.equal(back, 2 * target.float())
    with pytest.raises(ConfigError, match="share memory"):
        _core.convert([source], [source])
