"""Experts that lie over two axes: each rank of ``ep`` has some of them, each rank of ``tp`` a part of each.

Tokens go to the ranks of ``ep`` that have their experts. A rank's experts so get the gradients of all tokens of the
axis: divided by its size these are the mean over its ranks, and ``shardcore.shard`` averages over the others, which
hold the same experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardcore import _torch_private as private
from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import attach_experts, attach_pieces
from shardcore.tensor.functions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_to_sequence,
    sum_over_ranks,
)
from shardcore.tensor.layers import cut, keep_part
from shardcore.tensor.pieces import Pieces, Range, even_ranges
from shardcore.tensor.routing import Route
from shardcore.tensor.saving import speak_of_whole_parameters

_PARAMETERS = ("gate_up_proj", "down_proj")


class Experts(nn.Module):
    """Gated perceptrons ``down(activation(gate(x)) * up(x))``, of which each token is given to some.

    Parameters, as this rank has them: ``gate_up_proj`` [experts / ep, 2 x hidden / tp, features] and ``down_proj``
    [experts / ep, features, hidden / tp]. A layer that is built here draws its whole weights and keeps its part: the
    same seed gives the same experts on any number of ranks.

    Args:
        num_experts: on all ranks.
        mesh: its ``ep`` and ``tp`` axes.

    Raises:
        ConfigError: the ranks of ``ep`` do not divide the experts, or fewer hidden features than ranks of ``tp``.
    """

    unit: str = "experts"
    """What the layer is called in messages and traces."""
    tensor_axis: Axis
    expert_axis: Axis
    in_sequence: bool = False
    """The ranks of ``tp`` come with parts of the sequence."""

    def __init__(
        self,
        num_experts: int,
        features: int,
        hidden: int,
        mesh: Mesh,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.act_fn = activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, features, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, features, hidden, device=device, dtype=dtype))
        for param in (self.gate_up_proj, self.down_proj):
            bound = param.shape[-1] ** -0.5  # that of nn.Linear
            nn.init.uniform_(param, -bound, bound)
        problem = why_not_split(num_experts, hidden, mesh["ep"].size, mesh["tp"].size)
        if problem:
            raise ConfigError(f"{self.unit}: {problem}")
        self._take_part(mesh["tp"], mesh["ep"])

    @classmethod
    def adopt(cls, module: nn.Module, tensor_axis: Axis, expert_axis: Axis, *, unit: str = "") -> Experts:
        """Turn a module with such parameters into one of these, in place. Not collective."""
        module.__class__ = cls
        adopted: Any = module
        adopted.unit = unit or cls.unit
        adopted._take_part(tensor_axis, expert_axis)
        experts: Experts = adopted
        return experts

    def _take_part(self, tensor_axis: Axis, expert_axis: Axis) -> None:
        self.tensor_axis, self.expert_axis = tensor_axis, expert_axis
        self.num_experts, hidden = self.gate_up_proj.shape[0], self.down_proj.shape[-1]
        parts = even_ranges(hidden, tensor_axis.size)
        gate_up = [[(a, b), (a + hidden, b + hidden)] for a, b in parts]
        for param, dim, ranges in (
            (self.gate_up_proj, 1, gate_up),
            (self.down_proj, 2, [[part] for part in parts]),
        ):
            _take_experts(param, expert_axis)
            cut(param, tensor_axis, dim, ranges)
        speak_of_whole_parameters(self)

    @private.not_traced
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Collective over both axes, forward and backward; all ranks of ``ep`` call it alike.

        Args:
            hidden_states: ``[tokens, features]``, the same on all ranks of ``tp``.
            top_k_index: ``[tokens, chosen]`` experts, 0 <= index < num_experts.
            top_k_weights: ``[tokens, chosen]`` their weights.

        Returns:
            ``[tokens, features]``, the weighted sum of what each token's experts give.

        Raises:
            IndexError: an expert that is not there.
        """
        axis = self.tensor_axis
        if self.in_sequence:
            tokens = gather_sequence(hidden_states, axis, 0, self.unit)
            weights = gather_sequence(top_k_weights, axis, 0, self.unit)
            chosen = gather_from_ranks(top_k_index, axis, 0, self.unit)
        else:
            tokens = copy_to_ranks(hidden_states, axis, self.unit)
            weights, chosen = copy_to_ranks(top_k_weights, axis, f"weights of {self.unit}"), top_k_index
        route = Route.of(chosen, self.num_experts, self.expert_axis, self.unit)
        rows = self._compute(route.dispatch(tokens), route.rows_of_expert)
        partial = route.combine(rows, weights)
        if self.in_sequence:
            return reduce_to_sequence(partial, axis, 0, self.unit)
        return sum_over_ranks(partial, axis, self.unit)

    def _compute(self, rows: torch.Tensor, rows_of_expert: list[int]) -> torch.Tensor:
        """Each expert of this rank on its rows. One without rows takes part, so that every rank has every gradient."""
        found = []
        for part, into, out in zip(
            rows.split(rows_of_expert), self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=True
        ):
            gate, up = F.linear(part, into).chunk(2, dim=-1)
            found.append(F.linear(self.act_fn(gate) * up, out))
        return torch.cat(found)

    def extra_repr(self) -> str:
        """The experts, and the part."""
        ep, tp = self.expert_axis, self.tensor_axis
        return f"{self.num_experts} experts, part {ep.rank} of {ep.size} of them, {tp.rank} of {tp.size} of each"


class MixtureOfExperts(nn.Module):
    """A router and its experts: each token's output is that of the ``num_chosen`` experts with the highest scores, by
    their probabilities among these (Jiang et al. 2024, "Mixtral of Experts", section 2.1).

    Input and output ``[..., features]``; the same on all ranks of ``tp``. Collective as :class:`Experts`.

    Args:
        num_experts: on all ranks.
        num_chosen: experts for each token.
        mesh: its ``ep`` and ``tp`` axes.

    Raises:
        ConfigError: as :class:`Experts`; or more chosen than there are.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        num_experts: int,
        num_chosen: int,
        mesh: Mesh,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_chosen <= num_experts:
            raise ConfigError(f"MixtureOfExperts(num_chosen={num_chosen}): expected 1 to {num_experts} experts")
        self.num_chosen = num_chosen
        self.router = nn.Linear(features, num_experts, bias=False, device=device, dtype=dtype)
        attach_pieces(self.router.weight, Pieces.whole(mesh["tp"], self.router.weight.shape))
        self.experts = Experts(num_experts, features, hidden, mesh, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., features]`` to the same."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = torch.topk(self.router(tokens), self.num_chosen, dim=-1)
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        mixed: torch.Tensor = self.experts(tokens, chosen, weights)
        return mixed.view(x.shape)


def find_experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold the weights of several gated perceptrons, as Hugging Face's models store experts."""
    for name, module in model.named_modules():
        params: list[Any] = [module._parameters.get(each) for each in _PARAMETERS]
        if all(param is not None and param.dim() == 3 for param in params):
            yield name, module


def why_not_split(num_experts: int, hidden: int, num_expert_ranks: int, num_tensor_ranks: int) -> str:
    """Why experts cannot be split over so many ranks; empty where they can."""
    if num_experts % num_expert_ranks:
        return f"{num_experts} experts do not divide over the ep={num_expert_ranks} ranks; choose a divisor for ep"
    if hidden < num_tensor_ranks:
        return f"{hidden} hidden features < {num_tensor_ranks} ranks"
    return ""


def why_unknown(module: nn.Module) -> str:
    """Why a module with the parameters of experts is not known to compute what :class:`Experts` does; empty if it was
    tried and does.
    """
    owner: Any = module
    into, out = owner.gate_up_proj, owner.down_proj
    names = [name for name, _ in module.named_parameters()]
    if sorted(names) != sorted(_PARAMETERS) or not callable(getattr(module, "act_fn", None)):
        return f"its parameters {', '.join(names)} and act_fn are not those of gated perceptrons"
    num_experts, features, hidden = into.shape[0], into.shape[2], out.shape[2]
    if tuple(into.shape) != (num_experts, 2 * hidden, features) or tuple(out.shape) != (num_experts, features, hidden):
        return f"its weights {tuple(into.shape)} and {tuple(out.shape)} are not [experts, outputs, inputs]"
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, features, generator=draw).to(into.device, into.dtype)
    weights = torch.rand(5, min(2, num_experts), generator=draw).to(into.device, into.dtype)
    chosen = torch.rand(5, num_experts, generator=draw).argsort(-1)[:, : weights.shape[1]].to(into.device)
    alone = Axis("alone", (0,), 0, None)
    try:
        with torch.no_grad():
            found = inspect.unwrap(type(module).forward)(module, x, chosen, weights)
            route = Route.of(chosen, num_experts, alone, "trial")
            expected = route.combine(Experts._compute(owner, route.dispatch(x), route.rows_of_expert), weights)
    except Exception as error:  # noqa: BLE001  # whatever it raises, it could not be tried
        return f"it could not be tried ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
    tolerance = 100 * torch.finfo(x.dtype).eps * float(expected.abs().max())
    if not isinstance(found, torch.Tensor) or float((found - expected).abs().max()) > tolerance:
        return "it does not compute what gated perceptrons do"
    return ""


def _take_experts(param: nn.Parameter, axis: Axis) -> None:
    """Keep this rank's experts, along dim 0; their gradients are means over the ranks of the axis."""
    if axis.size == 1:
        return
    per_rank = param.shape[0] // axis.size
    ranges: list[list[Range]] = [[(i * per_rank, (i + 1) * per_rank)] for i in range(axis.size)]
    pieces = Pieces(axis, tuple(param.shape), 0, tuple(map(tuple, ranges)))
    keep_part(param, pieces)
    attach_experts(param, pieces)
    was_trainable = param.requires_grad
    param.requires_grad_(True)  # torch takes hooks of such tensors only; it may become one later
    param.register_hook(lambda grad: grad / axis.size)
    param.requires_grad_(was_trainable)
