"""What is known of the gradient only over all ranks: its norm, and whether there is any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcore import comm
from shardcore.protocols import PipelinePart, ShardedGroup, ShardedRoot, find_pipeline


def sum_of_squares(root: ShardedRoot) -> torch.Tensor:
    """[] float64: the squared norm of a model's whole reduced gradient, each element counted once. Collective over the
    shard axis, and over the pipeline's ranks.
    """
    part = find_pipeline(root.module)
    pieces = [piece for group in root.groups if group.trainable for piece in _counted(group, part)]
    norms = [torch.linalg.vector_norm(piece).to(torch.float64) for piece in pieces]
    zero = torch.zeros((), dtype=torch.float64, device=root.device)
    squares = torch.stack(norms).square().sum() if norms else zero
    squares = comm.sum_over_ranks(squares, root.shard_axis, "gradient norm")
    return squares if part is None else comm.sum_over_ranks(squares, part.pipeline_axis, "gradient norm of stages")


def any_gradient(roots: Sequence[ShardedRoot], present: Sequence[Sequence[bool]]) -> bool:
    """Whether any parameter has a gradient, on any stage. Collective over the pipeline's ranks."""
    found = torch.tensor([any(any(flags) for flags in present)], dtype=torch.uint8)
    for part in filter(None, (find_pipeline(root.module) for root in roots)):
        comm.max_over_ranks(found, part.pipeline_axis, "any gradient")
    return bool(found)


def _counted(group: ShardedGroup, part: PipelinePart | None) -> list[torch.Tensor]:
    """The pieces of a group's gradient shard that this rank counts: all, but for weights that another stage counts."""
    if part is None or all(part.counts_in_norm(slot.param) for slot in group.slots):
        return [group.grad_shard]
    pieces = []
    for slot in group.slots:
        if part.counts_in_norm(slot.param):
            start, stop, offset = group.local_range(slot)
            pieces.append(group.grad_shard[offset : offset + stop - start])
    return pieces
