"""Cross-entropy over logits that are split along the vocabulary: they are never gathered.

After Shoeybi et al. 2019 (Megatron-LM, section 3): ranks exchange the largest logit, the sum of exponentials and the
target's logit of each row, and each computes the gradient of its own logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.tensor.layers import as_axis
from shardcore.tensor.pieces import even_ranges


@private.not_traced
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: Axis | Mesh,
    vocabulary: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What ``torch.nn.functional.cross_entropy`` gives for the whole logits, on every rank. Collective over the axis.

    16-bit logits are summed up in fp32, and so is the loss.

    Args:
        logits: ``[..., this rank's part of the vocabulary]``, split as :class:`VocabParallelEmbedding` and
            :class:`ColumnParallelLinear` do.
        target: ``[...]`` ids, int64, the same on every rank; ``ignore_index`` marks rows that do not count.
        vocabulary: the number of logits of all ranks.
        reduction: ``"mean"`` over the rows that count (NaN where there are none), ``"sum"``, or ``"none"``.

    Raises:
        ConfigError: shapes that do not fit, an unknown reduction, or (on CPU) a target outside of the vocabulary.
    """
    axis = as_axis(axis)
    start, stop = even_ranges(vocabulary, axis.size)[axis.rank]
    if logits.shape[-1] != stop - start or logits.shape[:-1] != target.shape:
        raise ConfigError(
            f"cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)} on rank {axis.rank} of "
            f"{axis.size}, expected [..., {stop - start}] (its part of the vocabulary of {vocabulary}) and [...]"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"cross_entropy(reduction={reduction!r}): expected 'mean', 'sum' or 'none'")
    counts = target != ignore_index
    if not target.is_cuda and bool((counts & ((target < 0) | (target >= vocabulary))).any()):
        raise ConfigError(f"cross_entropy: a target outside of 0 to {vocabulary - 1} that is not {ignore_index}")
    work = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    losses: torch.Tensor = _CrossEntropy.apply(work, target, counts, axis, (start, vocabulary), label_smoothing)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        axis: Axis,
        part: tuple[int, int],
        smoothing: float,
    ) -> torch.Tensor:
        start, vocabulary = part
        largest = logits.detach().amax(-1)
        comm.all_reduce(largest, axis, "largest logit", maximum=True).wait()
        rows = target - start
        is_mine = counts & (rows >= 0) & (rows < logits.shape[-1])
        rows = rows.masked_fill(~is_mine, 0)
        shifted = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1) - largest
        sums = [(logits - largest.unsqueeze(-1)).exp_().sum(-1), shifted.masked_fill(~is_mine, 0)]
        if smoothing:
            sums.append((logits - largest.unsqueeze(-1)).sum(-1))
        total = torch.stack(sums)
        comm.sum_tensor(total, axis, "sums of logits").wait()
        log_sum = total[0].log()
        losses = log_sum - (1 - smoothing) * total[1]
        if smoothing:
            losses = losses - smoothing / vocabulary * total[2]
        ctx.save_for_backward(logits, rows, is_mine, counts, log_sum + largest)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return losses.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, rows, is_mine, counts, log_sum = ctx.saved_tensors
        share = (logits - log_sum.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            share.sub_(ctx.smoothing / ctx.vocabulary)
        hit = is_mine.to(share.dtype).mul_(1 - ctx.smoothing)
        share.scatter_add_(-1, rows.unsqueeze(-1), -hit.unsqueeze(-1))
        share.mul_((grad * counts).unsqueeze(-1))
        return share, None, None, None, None, None
