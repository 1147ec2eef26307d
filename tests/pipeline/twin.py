"""The same training twice: in a pipeline, and by ``reference_step`` in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardcore as sc
from pipeline.models import MODELS, Data, loss_fn
from shardcore.pipeline import AutoSchedule, Pipeline, build_layers


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, and how."""

    model: str = "tied"
    schedule: str | AutoSchedule = "1f1b"
    m: int = 4
    steps: int = 5
    stage: int | None = 0
    clip: float | None = None
    data: Data = field(default_factory=Data)
    options: dict[str, Any] = field(default_factory=dict)
    precision: sc.Precision | None = None


@dataclass(kw_only=True)
class Trained:
    """What a run left."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """On each rank, those of its stages."""


def make(recipe: Recipe, mesh: sc.Mesh) -> tuple[Pipeline, torch.optim.Optimizer]:
    """The pipeline of a recipe and its optimizer. Collective."""
    pipe = Pipeline(
        MODELS[recipe.model](),
        mesh,
        schedule=recipe.schedule,
        num_microbatches=recipe.m,
        loss_fn=loss_fn,
        **recipe.options,
    )
    if recipe.stage is None:
        return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    sc.shard(pipe, mesh, stage=recipe.stage, precision=recipe.precision)
    optimizer = sc.optimizer(torch.optim.SGD, pipe, lr=0.1, momentum=0.9, max_grad_norm=recipe.clip)
    optimizer.track_grad_norm = True
    return pipe, optimizer


def train(recipe: Recipe, mesh: sc.Mesh) -> Trained:
    """Train in a pipeline. Collective."""
    pipe, optimizer = make(recipe, mesh)
    run = Trained()
    data = recipe.data.of_rank(mesh.data_rank, mesh.data_world, recipe.m, recipe.steps)
    for _ in range(recipe.steps):
        run.losses.append(float(pipe.train_batch(data, optimizer)))
        run.norms.append(getattr(optimizer, "grad_norm", None) or 0.0)
    run.parameters = parameters(pipe)
    return run


def parameters(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters, every name of a tied one. Collective."""
    if sc.protocols.find_root(pipe) is None:
        return {n: p.detach().clone() for n, p in pipe.named_parameters(remove_duplicate=False)}
    with sc.summon(pipe):
        return {n: p.detach().clone() for n, p in pipe.named_parameters(remove_duplicate=False)}


def train_alone(recipe: Recipe, world: int = 1) -> Trained:
    """The reference, for ``world`` data-parallel ranks."""
    layers = build_layers(MODELS[recipe.model](), seed=recipe.options.get("seed", 0))
    modules = nn.ModuleDict({layer.name: layer.module for layer in layers if isinstance(layer.module, nn.Module)})
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    run = Trained()
    for step in range(recipe.steps):
        batches = [recipe.data.batch(step, i) for i in range(recipe.m * world)]
        loss, norm = sc.testing.reference_step(
            layers, batches, optimizer, loss_fn=loss_fn, step=step, max_grad_norm=recipe.clip
        )
        run.losses.append(loss)
        run.norms.append(norm)
    run.parameters = {n: p.detach().clone() for n, p in modules.named_parameters(remove_duplicate=False)}
    return run


def assert_follows(run: Trained, alone: Trained, tolerance: float = 2e-5, *, norms: bool = True) -> None:
    """The run's losses, norms and parameters are the reference's; sums are taken in another order."""
    torch.testing.assert_close(run.losses, alone.losses, rtol=tolerance, atol=tolerance)
    if norms:
        torch.testing.assert_close(run.norms, alone.norms, rtol=tolerance, atol=tolerance)
    assert run.parameters
    for name, value in run.parameters.items():
        torch.testing.assert_close(value, alone.parameters[name], rtol=tolerance, atol=tolerance)
