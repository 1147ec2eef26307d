"""What is known of the gradient only over all ranks: its norm, and whether there is any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardcore import comm
from shardcore.optim.held import Held
from shardcore.protocols import (
    PipelinePart,
    ShardedRoot,
    find_expert_axis,
    find_experts,
    find_pieces,
    find_pipeline,
    find_tensor_axis,
)

if TYPE_CHECKING:
    from shardcore.mesh import Axis


def sum_of_squares(root: ShardedRoot, held: Held) -> torch.Tensor:
    """[] float64: the squared norm of an optimizer's part of a model's reduced gradient, each element counted once.
    Collective over the shard axis, the tensor axis, that of experts, and the pipeline's ranks.
    """
    part = find_pipeline(root.module)
    params = [slot.param for group in root.groups for slot in group.slots]
    tensor_axis, expert_axis = find_tensor_axis(params), find_expert_axis(params)
    if root.shard_axis.size > 1:
        expert_axis = None  # it is a part of the shard axis, over which each expert's shards are counted once
    if part is None and tensor_axis is None and expert_axis is None:
        grads = held.grads(root)
    else:
        grads = held.counted_grads(root, lambda param: _counted(param, part, tensor_axis, expert_axis))
    norms = [torch.linalg.vector_norm(grad).to(torch.float64) for grad in grads]
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(root.device) for norm in norms]
    zero = torch.zeros((), dtype=torch.float64, device=root.device)
    squares = torch.stack(norms).square().sum().to(root.device) if norms else zero
    squares = comm.sum_over_ranks(squares, root.shard_axis, "gradient norm")
    if expert_axis is not None:
        squares = comm.sum_over_ranks(squares, expert_axis, "gradient norm of experts")
    if tensor_axis is not None:
        squares = comm.sum_over_ranks(squares, tensor_axis, "gradient norm of tensor-parallel parts")
    return squares if part is None else comm.sum_over_ranks(squares, part.pipeline_axis, "gradient norm of stages")


def _counted(
    param: nn.Parameter, part: PipelinePart | None, tensor_axis: Axis | None, expert_axis: Axis | None
) -> Sequence[tuple[int, int]]:
    """The ranges of a flattened parameter that this rank counts."""
    if part is not None and not part.counts_in_norm(param):
        return ()
    if expert_axis is not None and expert_axis.rank and find_experts(param) is None:
        return ()
    pieces = find_pieces(param)
    if pieces is not None:
        return tuple(pieces.counted_flat_ranges())
    # A parameter that joined the model after it was split is whole on every rank of the tensor axis.
    return () if tensor_axis is not None and tensor_axis.rank else ((0, param.shape.numel()),)


def any_gradient(roots: Sequence[ShardedRoot], *, found: bool) -> bool:
    """Whether any stage has ``found`` a gradient. Collective over the pipeline's ranks; local where there are none."""
    parts = [part for part in (find_pipeline(root.module) for root in roots) if part is not None]
    flag = torch.tensor([found], dtype=torch.uint8)
    for part in parts:
        comm.max_over_ranks(flag, part.pipeline_axis, "any gradient")
    return bool(flag) if parts else found
