"""Projections of one input whose outputs are split over the ranks, as one node of the autograd graph.

Their input gradients are partial sums over the ranks' parts of the outputs. Taken together they are summed over the
ranks once, and the sum travels while the weight gradients are computed. With an input that is split along the sequence
(Korthikanti et al. 2022, section 4.2) backward gathers it anew, so that only the rank's part stays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.mesh import Axis
from shardcore.tensor.functions import gather_sequence

if TYPE_CHECKING:
    from shardcore.tensor.layers import ColumnParallelLinear

_SOURCE = "_shardcore_sequence_part"


def gather_input(x: torch.Tensor, axis: Axis, dim: int, unit: str) -> torch.Tensor:
    """The whole sequence of which ``x`` is this rank's part, for column-parallel layers. Collective over the axis."""
    whole = gather_sequence(x, axis, dim, unit)
    if whole is not x:
        setattr(whole, _SOURCE, (x, dim))
    return whole


@dataclass(slots=True)
class _Computed:
    """Outputs for one input that their layers have not asked for yet."""

    x: torch.Tensor
    version: int
    outputs: dict[ColumnParallelLinear, torch.Tensor]


class Columns:
    """Column-parallel layers with the same input. The first one that is called with it computes for all."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self._layers = list(layers)
        self._computed: _Computed | None = None

    @private.not_traced
    def output(self, layer: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        """``[..., out_features of this rank]`` of one layer. Backward is collective over its axis."""
        found = self._computed
        if found is not None and found.x is x and found.version == x._version and layer in found.outputs:
            output = found.outputs.pop(layer)
            if not found.outputs:
                self._computed = None
            return output
        if found is not None:  # some layer did not want what was computed for it: they do not share their input
            self._computed = None
            self._layers = []
        if layer not in self._layers or len(self._layers) == 1 or self._have_inputs_of_their_own():
            return _project(x, [layer])[0]
        outputs = dict(zip(self._layers, _project(x, self._layers), strict=True))
        output = outputs.pop(layer)
        self._computed = _Computed(x, x._version, outputs)
        return output

    def _have_inputs_of_their_own(self) -> bool:
        """Whether each layer is a unit of sharding, say, which is called with its own view of the input. To find out by
        comparing inputs would be too late for a forward that is computed again: that would share nothing.
        """
        return any(private.has_forward_pre_hook(layer) for layer in self._layers[1:])


def _project(x: torch.Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[torch.Tensor, ...]:
    whole = x
    x, dim = x.__dict__.get(_SOURCE, (x, None))
    sums = dim is not None or not layers[0].input_is_gathered
    params = [param for layer in layers for param in (layer.weight, layer.bias)]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, whole = x.to(dtype), whole.to(dtype)
        params = [None if param is None else param.to(dtype) for param in params]
    job = _Job(layers[0].axis, layers[0].unit, dim, sums, [layer.transposed for layer in layers])
    outputs: tuple[torch.Tensor, ...] = _Project.apply(x, whole.detach() if dim is not None else None, job, *params)
    return outputs


@dataclass(frozen=True, slots=True)
class _Job:
    axis: Axis
    unit: str
    sequence_dim: int | None
    """The input is a part of the sequence along this dim, and its gradient is split so."""
    sums: bool
    """The input gradient is summed over the ranks here, not by what has gathered the input."""
    transposed: list[bool]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, whole: torch.Tensor | None, job: _Job, *params: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.job = job
        ctx.set_materialize_grads(False)
        weights, biases = params[::2], params[1::2]
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        rows = x if whole is None else whole
        return tuple(
            torch.nn.functional.linear(rows, weight.t() if transposed else weight, bias)
            for weight, bias, transposed in zip(weights, biases, job.transposed, strict=True)
            if weight is not None
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        job: _Job = ctx.job
        x, *weights = ctx.saved_tensors
        rows = None
        if job.sequence_dim is not None and any(ctx.needs_input_grad[3::2]):
            rows = comm.gather_dim(x, job.axis, job.sequence_dim, f"sequence of {job.unit}")
        input_grad = _start_input_grad(job, grads, weights) if ctx.needs_input_grad[0] else None
        whole = x if rows is None else rows.wait()
        flat = whole.reshape(-1, whole.shape[-1])
        found: list[torch.Tensor | None] = []
        for i, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[3 + 2 * i : 5 + 2 * i]
            out = None if grad is None else grad.reshape(-1, grad.shape[-1])
            found.append(_weight_grad(flat, out, job.transposed[i]) if needs_weight and out is not None else None)
            found.append(out.sum(0) if needs_bias and out is not None else None)
        return (None if input_grad is None else input_grad.wait(), None, None, *found)


def _weight_grad(rows: torch.Tensor, out: torch.Tensor, transposed: bool) -> torch.Tensor:
    return rows.t() @ out if transposed else out.t() @ rows


def _start_input_grad(job: _Job, grads: Sequence[torch.Tensor | None], weights: list[torch.Tensor]) -> comm.Pending:
    """The gradient of the input, which is being summed over the ranks."""
    total: torch.Tensor | None = None
    shape: list[int] = []
    for grad, weight, transposed in zip(grads, weights, job.transposed, strict=True):
        if grad is None:
            continue
        back = weight.t() if transposed else weight
        out = grad.reshape(-1, grad.shape[-1])
        shape = [*grad.shape[:-1], back.shape[1]]
        total = out @ back if total is None else total.addmm_(out, back)
    if total is None:
        raise RuntimeError(f"{job.unit}: backward without a gradient")  # autograd does not call it so
    result, what = total.view(shape), f"input gradient of {job.unit}"
    if job.sequence_dim is not None:
        return comm.reduce_dim(result, job.axis, job.sequence_dim, what)
    if not job.sums:
        return comm.Pending(comm.Handle((), None), lambda: result)
    return comm.Pending(comm.sum_tensor(result, job.axis, what), lambda: result)
