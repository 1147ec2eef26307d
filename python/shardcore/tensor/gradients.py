"""Gradients of parameters that several ranks of the tensor axis hold and use for different work."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcore import comm
from shardcore.mesh import Axis
from shardcore.tensor.pieces import Range


def sum_gradient(param: torch.Tensor, axis: Axis, unit: str, dim: int = 0, ranges: Sequence[Range] = ()) -> None:
    """From now on, sum each gradient of ``param`` over the axis, so that copies stay equal. Backward is collective.

    Args:
        ranges: what of it other ranks hold, along ``dim``; all of it where empty.
    """
    if axis.size == 1 or not param.is_floating_point():
        return

    def on_gradient(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        parts = [total.narrow(dim, start, stop - start) for start, stop in ranges] or [total]
        shared = torch.cat([part.reshape(-1) for part in parts]) if ranges else total
        comm.sum_tensor(shared, axis, f"gradient of {unit}").wait()
        if ranges:
            for part, summed in zip(parts, shared.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view(part.shape))
        return total

    was_trainable = param.requires_grad
    param.requires_grad_(True)  # torch takes hooks of such tensors only; it may become one later
    param.register_hook(on_gradient)
    param.requires_grad_(was_trainable)
