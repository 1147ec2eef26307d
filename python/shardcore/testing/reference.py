"""The twin of a pipeline step: one process, all layers, the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardcore.pipeline import BuiltLayer, RandomKey, holding, restored_randomness


def reference_step(
    layers: Sequence[BuiltLayer],
    batches: Sequence[tuple[Any, Any]],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    step: int = 0,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    max_grad_norm: float | None = None,
) -> tuple[float, float]:
    """One training step of a whole model as a ``shardcore.pipeline.Pipeline`` would make it, without one.

    Args:
        layers: from ``shardcore.pipeline.build_layers`` with the pipeline's seed.
        batches: (inputs, labels) of all micro-batches of the global batch: the i-th of data-parallel rank r of W is
            number i * W + r.
        optimizer: a torch optimizer over the layers' parameters; stepped and cleared.
        step, seed: the pipeline's ``num_steps`` before the step, and its seed.
        weights: of the micro-batches in the mean loss; None: all the same.
        max_grad_norm: clip before the step.

    Returns:
        (mean loss, global norm of the gradient before clipping).
    """
    params = list(
        dict.fromkeys(p for layer in layers if isinstance(layer.module, nn.Module) for p in layer.module.parameters())
    )
    shares = [1 / len(batches)] * len(batches) if weights is None else [w / sum(weights) for w in weights]
    total = 0.0
    with restored_randomness(torch.device("cpu")):
        for i, ((inputs, labels), share) in enumerate(zip(batches, shares, strict=True)):
            value = inputs
            with holding({}):
                for layer in layers:
                    RandomKey(seed, step, i).seed_layer(layer.name, torch.device("cpu"))
                    value = layer.apply(value)
            loss = value if loss_fn is None else loss_fn(value, labels)
            (loss * share).backward()
            total += float(loss.detach()) * share
    grads = [p.grad for p in params if p.grad is not None]
    norm = float(torch.stack([grad.double().norm() for grad in grads]).norm())
    if max_grad_norm is not None:
        for grad in grads:
            grad.mul_(min(1.0, max_grad_norm / (norm + 1e-6)))
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return total, norm
