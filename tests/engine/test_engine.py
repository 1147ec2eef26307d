"""What an engine does at boundaries, what it answers, and what it refuses. Tests named after a fault carry its id."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from engine.loops import batches, config
from shardcore.errors import ConfigError, StateError
from shardcore.testing import spmd, zoo


def make(stage: int = 2, accumulation: int = 1, model: nn.Module | None = None, **more: Any) -> sc.Engine:
    engine, _, _, _ = sc.initialize(model=model or zoo.build("mlp"), config=config(stage, accumulation, **more))
    return engine


def train(engine: sc.Engine, num_micro_batches: int, name: str = "mlp") -> None:
    for index in range(num_micro_batches):
        engine.backward(zoo.loss(engine, batches(name, engine.mesh, index, 1)[0]))
        engine.step()


@spmd(world=2)
def test_nothing_moves_before_the_boundary() -> None:
    engine = make(
        accumulation=3, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_min_lr": 1e-3}}
    )
    start = sc.state_dict(engine.module, rank0_only=False)
    lr = engine.get_lr()
    boundaries = []
    for _ in range(2):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        train(engine, 1)
    assert boundaries == [False, False]
    assert engine.get_lr() == lr
    assert (engine.global_steps, engine.micro_steps) == (0, 2)
    for name, tensor in sc.state_dict(engine.module, rank0_only=False).items():
        assert torch.equal(tensor, start[name])
    assert engine.is_gradient_accumulation_boundary()
    train(engine, 1)
    assert (engine.global_steps, engine.global_samples) == (1, 24)
    assert engine.was_step_applied()
    assert any(not torch.equal(t, start[n]) for n, t in sc.state_dict(engine.module, rank0_only=False).items())


@spmd(world=4)
def test_a9_the_scheduler_steps_once_per_update() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear", "warmup_max_lr": 0.1}}
    engine = make(accumulation=3, scheduler=scheduler)
    train(engine, 12)
    assert engine.lr_scheduler.last_epoch == 4
    assert engine.get_lr() == pytest.approx([0.05])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_b27_a_partial_window_is_a_mean_over_what_is_in(stage: int) -> None:
    """10 micro-batches with 4 per step: the last two are stepped on demand, divided by two."""
    settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}
    engine = make(stage, accumulation=4, **settings)
    reference = zoo.build("mlp")
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for index in range(10):
        batch = zoo.batch("mlp", index, 8)
        size = 4 if index < 8 else 2
        (zoo.loss(reference, batch) / size).backward()
        engine.backward(zoo.loss(engine, zoo.rank_slice(batch, engine.global_rank, 2)))
        engine.step()
        if index % 4 == 3 or index == 9:
            sgd.step()
            sgd.zero_grad()
    assert engine.global_steps == 2
    engine.step(flush=True)
    engine.step(flush=True)  # nothing is left
    assert engine.global_steps == 3
    for name, tensor in sc.state_dict(engine.module, rank0_only=False).items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


@spmd(world=2)
def test_the_optimizers_own_step_takes_a_partial_window_too() -> None:
    settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}
    left, right = make(2, accumulation=4, **settings), make(2, accumulation=1, **settings)
    for engine in (left, right):
        train(engine, 1)
    assert left.optimizer is not None
    left.optimizer.step()
    for a, b in zip(left.module.state_dict().values(), right.module.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@spmd(world=2)
def test_answers() -> None:
    engine = make(3, accumulation=2, fp16={"enabled": True, "loss_scale": 128.0}, steps_per_print=7)
    assert engine.get_global_grad_norm() is None
    train(engine, 2)
    assert engine.train_batch_size() == 16
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.gradient_clipping() == 0.5
    assert engine.zero_optimization_stage() == 3
    assert engine.fp16_enabled()
    assert not engine.bfloat16_enabled()
    assert engine.loss_scale() == 128.0
    assert engine.steps_per_print() == 7
    assert engine.get_type() == ["AdamW"]
    assert engine.get_mom() == [(0.9, 0.999)]
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm > 0
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (2, 2, 1)
    assert isinstance(engine.basic_optimizer, torch.optim.AdamW)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = engine.no_such_name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_b10_the_norm_is_that_before_clipping(stage: int) -> None:
    norms = []
    for clipping in (0.5, 1e6):
        engine = make(stage, gradient_clipping=clipping)
        train(engine, 1)
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


@spmd(world=2)
def test_batch_size_setters() -> None:
    engine = make(accumulation=2)
    engine.set_train_batch_size(32)
    assert engine.gradient_accumulation_steps() == 4
    engine.set_train_micro_batch_size(2)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (16, 4)
    with pytest.raises(ConfigError, match="multiple of micro batch 2 x 2"):
        engine.set_train_batch_size(6)
    assert issubclass(ConfigError, ValueError)


@spmd(world=2)
def test_the_caller_may_own_the_boundary() -> None:
    engine = make(accumulation=4)
    engine.set_gradient_accumulation_boundary(False)
    train(engine, 6)
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    train(engine, 1)
    assert engine.global_steps == 1
    managed = make(accumulation=4, managed_gradient_accumulation=False)
    train(managed, 3)
    assert managed.global_steps == 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=2)
def test_u8_no_optimizer(stage: int) -> None:
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    engine, optimizer, _, _ = sc.initialize(model=zoo.build("mlp"), config=settings)
    assert optimizer is None
    with torch.no_grad():
        assert torch.isfinite(zoo.loss(engine, zoo.batch("mlp", 0, 4)))
    zoo.loss(engine, zoo.batch("mlp", 0, 4)).backward()
    with pytest.raises(StateError, match="optimizer"):
        engine.step()


@spmd(world=2)
def test_step_without_backward() -> None:
    engine = make()
    with pytest.raises(StateError, match="without a backward"):
        engine.step()
    train(engine, 1)
    with pytest.raises(StateError, match="without a backward"):
        engine.step()


@spmd(world=2)
def test_step_inside_no_sync() -> None:
    engine = make()
    with engine.no_sync(), pytest.raises(StateError, match="no_sync"):
        train(engine, 1)


@spmd(world=2)
def test_a_loss_that_is_none() -> None:
    engine = make()
    inputs = zoo.batch("mlp", 0, 4)["x"]
    output = engine(inputs)
    with pytest.raises(StateError, match="scalar"):
        engine.backward(output)
    with pytest.raises(StateError, match="requires a gradient"):
        engine.backward(output.detach().mean())
    with pytest.raises(StateError, match="float"):
        engine.backward(1.0)  # type: ignore[arg-type]


@spmd(world=2)
def test_a17_the_callers_groups_win_over_the_config() -> None:
    model = zoo.build("mlp")
    first, *rest = model.parameters()
    groups = [
        {"params": [first], "lr": 1e-3, "weight_decay": 0.1},
        {"params": rest[:2], "lr": 1e-4, "weight_decay": 0.0},
        {"params": rest[2:]},
    ]
    settings = config(2, optimizer={"type": "SGD", "params": {"lr": 5e-4}})
    engine, optimizer, _, _ = sc.initialize(model=model, model_parameters=groups, config=settings)
    assert optimizer is not None
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-3, 0.1), (1e-4, 0.0), (5e-4, 0)]
    before = sc.state_dict(model, rank0_only=False)
    train(engine, 1)
    assert all(not torch.equal(t, before[n]) for n, t in sc.state_dict(model, rank0_only=False).items())


@spmd(world=2)
def test_b29_a_client_optimizer_and_scheduler_built_before() -> None:
    model = zoo.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    engine, sharded, _, got = sc.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings)
    assert got is scheduler
    assert sharded is not None
    before = sc.state_dict(model, rank0_only=False)
    train(engine, 2)
    assert engine.get_lr() == [0.025]
    assert all(not torch.equal(t, before[n]) for n, t in sc.state_dict(model, rank0_only=False).items())


@spmd(world=2)
def test_training_data_become_a_loader_of_this_ranks_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0).repeat(6, 1).T, torch.arange(10.0).repeat(3, 1).T)
    engine, _, loader, _ = sc.initialize(model=zoo.build("mlp"), config=config(2), training_data=data)
    assert loader is not None
    seen = torch.cat([inputs[:, 0] for inputs, _ in loader])
    everything = [torch.empty_like(seen) for _ in range(2)]
    torch.distributed.all_gather(everything, seen)
    assert sorted(torch.cat(everything).tolist()) == list(range(10))
    assert engine.training_dataloader is loader


@spmd(world=1)
def test_u5_the_log_is_short() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardcore")
    log.addHandler(handler)
    root_level, level = logging.getLogger().level, log.level
    log.setLevel(logging.INFO)
    try:
        engine = make(steps_per_print=2, wall_clock_breakdown=True)
        train(engine, 4)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert 4 <= len(lines) <= 10
    assert any("step=2" in line for line in lines)
    assert any("backward" in line for line in lines)
    assert logging.getLogger().level == root_level


@spmd(world=2)
def test_an_exception_in_a_step_can_be_recovered_from() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = zoo.build("mlp")
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            if self.fails:
                raise ValueError("out of luck")
            return self.layers[2](self.layers[1](x))  # type: ignore[no-any-return]

    engine = make(3, model=Fragile())
    train(engine, 1)
    engine.module.fails = True
    with pytest.raises(ValueError, match="out of luck"):
        train(engine, 1)
    engine.reset_iteration()
    engine.module.fails = False
    train(engine, 2)
    assert engine.global_steps == 3
