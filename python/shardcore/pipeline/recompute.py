"""Layers run one after another, some of them in groups whose activations are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shardcore.pipeline.layers import BuiltLayer
from shardcore.pipeline.randomness import RandomKey
from shardcore.pipeline.skips import holding

Held = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Which layers keep only their input from forward to backward."""

    interval: int = 0
    """Layers of a stage that are recomputed together; 0 recomputes nothing."""
    function: Callable[..., Any] | None = None
    """Called as ``function(run, *args)``; None is torch's non-reentrant checkpoint."""
    classes: Sequence[str] | None = None
    """Only groups whose layers are all of these classes."""

    def covers(self, layers: Sequence[BuiltLayer]) -> bool:
        """Whether this group of layers is recomputed."""
        if not self.interval or not torch.is_grad_enabled():
            return False
        return self.classes is None or all(layer.class_name in self.classes for layer in layers)


def run_layers(
    layers: Sequence[BuiltLayer],
    value: Any,
    held: Held,
    key: RandomKey | None,
    device: torch.device,
    recompute: Recompute,
) -> tuple[Any, Held]:
    """The layers on ``value``; returns what the last one gives, and what is set aside then."""

    def run(group: Sequence[BuiltLayer], value: Any, held: Held) -> tuple[Any, Held]:
        with holding(dict(held)) as left:  # a copy: recomputation must find what the forward found
            for layer in group:
                if key is not None:
                    key.seed_layer(layer.name, device)
                value = layer.apply(value)
        return value, left

    num_together = recompute.interval or len(layers)
    for start in range(0, len(layers), num_together):
        group = layers[start : start + num_together]
        if not recompute.covers(group):
            value, held = run(group, value, held)
        elif recompute.function is None:
            value, held = checkpoint(run, group, value, held, use_reentrant=False)
        else:
            value, held = recompute.function(run, group, value, held)
    return value, held
