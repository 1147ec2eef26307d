"""Pipelines behind the engine: DeepSpeed's calls, the articles' loop, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
import shardcore.deepspeed as deepspeed
from pipeline.models import Data, loss_fn, tied
from pipeline.twin import Recipe, Trained, assert_follows, parameters, train, train_alone
from shardcore.deepspeed.pipe import LayerSpec, PipelineModule
from shardcore.errors import ConfigError, StateError
from shardcore.pipeline import Pipeline, Recompute
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise


def config(**more: Any) -> dict[str, Any]:
    """SGD with momentum, clipped, on 4 micro-batches of 2."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        **more,
    }


def by_engine(engine: Any, steps: int, data: Any) -> Trained:
    """Train by ``train_batch``."""
    run = Trained()
    for _ in range(steps):
        run.losses.append(float(engine.train_batch(data)))
        run.norms.append(engine.get_global_grad_norm())
    run.parameters = parameters(engine.module)
    return run


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=4)
def test_deepspeeds_loop(stage: int) -> None:
    torch.distributed.barrier()
    module = PipelineModule(tied(), num_stages=2, loss_fn=loss_fn, base_seed=0)
    engine, optimizer, _, _ = deepspeed.initialize(model=module, config=config(zero_optimization={"stage": stage}))
    assert engine.is_first_stage() == (engine.global_rank < 2)
    assert engine.is_last_stage() == (engine.global_rank >= 2)
    mesh = module.mesh
    recipe = Recipe(m=4, clip=0.5)
    run = by_engine(engine, 5, recipe.data.of_rank(mesh.data_rank, 2, 4, 5))
    assert_follows(run, train_alone(recipe, world=2))
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (5, 20, 80)
    assert optimizer.num_steps == 5
    loss, logits = engine.eval_batch(Data().of_rank(0, 1, 2, 1), return_logits=True, num_micro_batches=2)
    assert loss.shape == ()
    assert (logits is not None) == engine.is_last_stage()


@spmd(world=2)
def test_the_articles_loop() -> None:
    """``engine(batch)`` takes the step's whole batch."""
    mesh = sc.Mesh(pp=2)
    recipe = Recipe(m=4, clip=0.5)
    pipe = Pipeline(tied(), mesh, loss_fn=loss_fn, num_microbatches=4)
    engine, *_ = sc.initialize(model=pipe, config=config())
    run = Trained()
    for step in range(recipe.steps):
        pairs = [recipe.data.batch(step, i) for i in range(4)]
        loss = engine((torch.cat([ids for ids, _ in pairs]), torch.cat([labels for _, labels in pairs])))
        assert engine.backward(loss) is loss
        engine.step()
        run.losses.append(float(loss))
        run.norms.append(engine.get_global_grad_norm())
    run.parameters = parameters(pipe)
    assert_follows(run, train_alone(recipe))
    with pytest.raises(StateError, match="without a backward"):
        engine.step()


@spmd(world=2)
def test_a_loader_of_the_engine() -> None:
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4), nn.ReLU(), LayerSpec(nn.Linear, 4, 4)], 2, loss_fn=F.mse_loss)
    engine, *_ = deepspeed.initialize(model=module, config=config())
    with pytest.raises((ConfigError, sc.errors.RankMismatchError), match="iterator"):
        engine.train_batch()
    sc.comm.clear_failure()


@spmd(world=2)
def test_a_set_loader_repeats() -> None:
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4), nn.ReLU(), LayerSpec(nn.Linear, 4, 4)], 2, loss_fn=F.mse_loss)
    engine, *_ = deepspeed.initialize(model=module, config=config())
    engine.set_dataloader([(torch.ones(2, 4), torch.zeros(2, 4))] * 3)
    losses = [float(engine.train_batch()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="num_stages"):
        PipelineModule([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="pass example="):
        PipelineModule([nn.Linear(2, 2)], 1, partition_method="profile")
    with pytest.raises(ConfigError, match="sequence slices"):
        Pipeline([nn.Linear(2, 2)], sc.Mesh(), schedule="seq-1f1b")
    with pytest.raises(ConfigError, match="cannot be cut"):
        Pipeline(nn.Linear(2, 2), sc.Mesh())
    with pytest.raises(ConfigError, match="partition='half'"):
        Pipeline([nn.Linear(2, 2)], sc.Mesh(), partition="half")


class Explodes(nn.Module):
    """Its gradient is not finite where the input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x times weights."""
        return x * self.weight


@spmd(world=4)
def test_all_stages_skip_an_overflow() -> None:
    """One micro-batch on one data rank overflows in the last stage: no rank updates, and all go on alike."""
    mesh = sc.Mesh(pp=2)
    pipe = Pipeline(
        [LayerSpec(nn.Linear, 4, 4), LayerSpec(Explodes)], mesh, num_microbatches=2, loss_fn=lambda y, _: y.sum()
    )
    sc.shard(pipe, mesh, stage=1, precision=sc.Precision(param="fp16"))
    optimizer = sc.optimizer("sgd", pipe, lr=0.01)
    bad = torch.full((1, 4), 6e4) if mesh.data_rank == 1 else torch.ones(1, 4)
    before = parameters(pipe)
    scale = optimizer.loss_scale.scale
    pipe.train_batch(iter([(torch.ones(1, 4), None), (bad, None)]), optimizer)
    assert not optimizer.step_was_applied
    assert_bitwise(parameters(pipe), before)
    applied = []
    for _ in range(20):
        pipe.train_batch(iter([(torch.ones(1, 4), None)] * 2), optimizer)
        applied.append(optimizer.step_was_applied)
    assert any(applied)
    assert optimizer.loss_scale.scale <= scale
    states = sc.comm.exchange([applied, optimizer.loss_scale.scale], mesh["pp"], "states")
    assert states[0] == states[1]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@spmd(world=2)
def test_16_bit_follows_one_stage(dtype: str) -> None:
    """16-bit weights and values between stages, fp32 masters: as fp32, but for 8 (11) bits of each."""
    precision = sc.Precision(param=dtype, loss_scale=64.0 if dtype == "fp16" else None)
    recipe = Recipe(clip=0.5, precision=precision)
    fp32 = train_alone(recipe)
    run = train(recipe, sc.Mesh(pp=2))
    run.parameters = {name: value.float() for name, value in run.parameters.items()}
    assert_follows(run, fp32, tolerance=6e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@spmd(world=2)
def test_e11_recomputed_layers_change_nothing(schedule: str) -> None:
    """The embedding is recomputed too, from integers, and trains; dropout is drawn again."""
    mesh = sc.Mesh(pp=2)
    recipe = Recipe(model="dropping", schedule=schedule, clip=0.5)
    plain = train(recipe, mesh)
    for interval in (1, 3):
        again = train(Recipe(**{**vars(recipe), "options": {"recompute": Recompute(interval=interval)}}), mesh)
        assert_bitwise([again.losses, again.parameters], [plain.losses, plain.parameters])


@spmd(world=2)
def test_e11_skips_survive_recomputation() -> None:
    mesh = sc.Mesh(pp=2)
    recipe = Recipe(model="skipping")
    again = Recipe(model="skipping", options={"recompute": Recompute(interval=2)})
    assert_bitwise(train(again, mesh).parameters, train(recipe, mesh).parameters)
