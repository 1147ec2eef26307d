"""Gradients of the mean over all target tokens of a step, however unevenly micro-batches and ranks hold them.

Losses are sums over tokens, so that a micro-batch without any is no 0/0; at the step the sum of gradients is divided by
the number of tokens on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import ShardedOptimizerMark, ShardedRoot


def count_tokens(
    optimizer: ShardedOptimizerMark, roots: Sequence[ShardedRoot], num_tokens: int | float | torch.Tensor
) -> None:
    """Add to what this rank's losses of the optimizer's window were summed over."""
    if not all(root.sums_over_tokens for root in roots):
        raise StateError(
            "count_tokens() without normalize='tokens': make the optimizer by shardcore.optimizer(..., "
            "normalize='tokens'), or set optimizer.normalize = 'tokens' before the first backward"
        )
    if isinstance(num_tokens, torch.Tensor):
        if num_tokens.numel() != 1:
            raise ConfigError(f"count_tokens: expected one number, got a tensor of shape {tuple(num_tokens.shape)}")
        num_tokens = num_tokens.detach().double().reshape(())
        num_tokens = num_tokens if num_tokens.is_cuda else float(num_tokens)
    if not isinstance(num_tokens, torch.Tensor) and not 0 <= num_tokens < float("inf"):
        raise ConfigError(f"count_tokens({num_tokens!r}): expected a number of at least 0")
    for root in roots:
        root.num_tokens[optimizer] = root.num_tokens.get(optimizer, 0.0) + num_tokens


def tokens_per_rank(optimizer: ShardedOptimizerMark, roots: Sequence[ShardedRoot]) -> float:
    """All target tokens of the optimizer's window divided by the number of data-parallel ranks, over which gradients
    are means. Collective over the data-parallel axis.

    Raises:
        StateError: no rank has counted any.
    """
    root = roots[0]
    total = torch.tensor([float(root.num_tokens.get(optimizer, 0.0))], dtype=torch.float64)
    total = comm.sum_over_ranks(total, root.data_axis, "target tokens")
    if not total > 0:
        raise StateError(
            "step() with normalize='tokens', but no rank has any target token in this window: call "
            "optimizer.count_tokens(n) (or engine.backward(loss, num_tokens=n)) for each micro-batch; where the data "
            "have none, call zero_grad() and go on"
        )
    return float(total) / root.data_axis.size
