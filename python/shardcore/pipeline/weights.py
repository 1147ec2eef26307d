"""How much each micro-batch counts in the mean loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcore.errors import ConfigError

Normalize = str | Callable[[Any], float]
IGNORED_LABEL = -100
"""What torch's cross-entropy leaves out, too."""


def loss_weights(normalize: Normalize, labels: Sequence[Any]) -> list[float]:
    """The weight of each micro-batch by its labels; empty where all count the same.

    Raises:
        ConfigError: an unknown way, or labels that are no integer tensor where tokens are to be counted.
    """
    if normalize == "microbatches":
        return []
    if callable(normalize):
        return [float(normalize(each)) for each in labels]
    if normalize != "tokens":
        raise ConfigError(f"normalize={normalize!r}: expected 'microbatches', 'tokens', or a function of the labels")
    for each in labels:
        if not isinstance(each, torch.Tensor) or each.is_floating_point():
            raise ConfigError(
                f"normalize='tokens' counts integer labels, got {type(each).__name__}; pass a function of the labels"
            )
    return [float((each != IGNORED_LABEL).sum()) for each in labels]
