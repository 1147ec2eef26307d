"""What is known of the gradient only over all ranks: its norm, and whether there is any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcore import comm
from shardcore.optim.held import Held
from shardcore.protocols import ShardedRoot, find_pipeline


def sum_of_squares(root: ShardedRoot, held: Held) -> torch.Tensor:
    """[] float64: the squared norm of an optimizer's part of a model's reduced gradient, each element counted once.
    Collective over the shard axis, and over the pipeline's ranks.
    """
    part = find_pipeline(root.module)
    grads = held.grads(root) if part is None else held.counted_grads(root, part.counts_in_norm)
    norms = [torch.linalg.vector_norm(grad).to(torch.float64) for grad in grads]
    zero = torch.zeros((), dtype=torch.float64, device=root.device)
    squares = torch.stack(norms).square().sum().to(root.device) if norms else zero
    squares = comm.sum_over_ranks(squares, root.shard_axis, "gradient norm")
    return squares if part is None else comm.sum_over_ranks(squares, part.pipeline_axis, "gradient norm of stages")


def any_gradient(roots: Sequence[ShardedRoot], *, found: bool) -> bool:
    """Whether any stage has ``found`` a gradient. Collective over the pipeline's ranks; local where there are none."""
    parts = [part for part in (find_pipeline(root.module) for root in roots) if part is not None]
    flag = torch.tensor([found], dtype=torch.uint8)
    for part in parts:
        comm.max_over_ranks(flag, part.pipeline_axis, "any gradient")
    return bool(flag) if parts else found
