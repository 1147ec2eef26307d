"""``shardcore.tensor.context_parallel``: ranks that share each sequence of a model, in place.

The model is called with whole sequences, the same on all ranks of the axis; each computes its part of the positions,
and meets the others in attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Axis, Mesh
from shardcore.protocols import find_context_axis, find_root, mark_context_split
from shardcore.tensor.guards import compare_first_call
from shardcore.tensor.ring import ring_attention
from shardcore.tensor.sequences import context_axis, part_of_sequence, positions_of_part
from shardcore.tensor.transformers_model import knows_causal_loss
from shardcore.tensor.ulysses import ulysses_attention

_SPLIT = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
_WITHOUT_EFFECT = ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "num_items_in_batch")
_CHANGES_SCORES = ("softcap", "s_aux", "position_bias", "sinks")
_IGNORED = -100


def context_parallel(model: nn.Module, mesh: Mesh | Axis, attention: str | None = "ring") -> nn.Module:
    """Let the ranks of the context axis share each sequence. Collective over the axis at the model's first call. Call
    it after ``parallelize`` and before ``shardcore.shard``.

    A Hugging Face model is called as before, with whole sequences, the same on all ranks of the axis. Its outputs are
    those of this rank's part of the positions; with ``labels`` its loss is the mean over all of them, on every rank,
    however few of the labels count on one.

    Args:
        attention: ``"ring"`` passes keys and values around, in balanced parts (:func:`part_of_sequence`) where the
            model is causal; ``"ulysses"`` exchanges heads, which the ranks must divide. None: the model's own forward
            takes parts of sequences, and calls :func:`ring_attention` or :func:`ulysses_attention`.

    Returns:
        The same module.

    Raises:
        ConfigError: a model whose attention cannot be replaced, or an unknown kind of attention.
        StateError: the model is sharded, or shares its sequences already.
    """
    axis = context_axis(mesh)
    if attention not in ("ring", "ulysses", None):
        raise ConfigError(f"context_parallel(attention={attention!r}): expected 'ring', 'ulysses' or None")
    if find_root(model) is not None or find_context_axis(model) is not None:
        raise StateError(
            "context_parallel: the model is sharded or shares its sequences already; call it once, before "
            "shardcore.shard"
        )
    if axis.size > 1 and attention is not None:
        _replace_attention(model, axis, attention)
        compare_first_call(model, axis, with_stream=False)
        _share_sequences(model, axis, balanced=_is_balanced(model, attention))
    mark_context_split(model, axis)
    return model


def _is_balanced(model: nn.Module, attention: str) -> bool:
    return attention == "ring" and all(getattr(m, "is_causal", True) for m in model.modules())


def _replace_attention(model: nn.Module, axis: Axis, attention: str) -> None:
    """Let the model's attention modules call this kind of attention, by the library's own table of such functions."""
    tables = {
        id(table): table
        for module in model.modules()
        for table in [getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", None)]
        if hasattr(module, "is_causal") and table is not None
    }
    config = getattr(model, "config", None)
    if not tables or config is None:
        raise ConfigError(
            f"context_parallel: {type(model).__name__} has no attention that Hugging Face's interface replaces; call "
            "shardcore.tensor.ring_attention(...) in its forward with parts of the sequence (part_of_sequence, "
            "positions_of_part), and give attention=None here"
        )
    name = f"shardcore_{attention}_{axis.key}"
    function = _attention_function(axis, attention, balanced=_is_balanced(model, attention))
    for table in tables.values():
        type(table).register(name, function)
    for module in model.modules():
        own: Any = getattr(module, "config", None)
        if hasattr(own, "_attn_implementation"):
            own._attn_implementation = name


def _attention_function(axis: Axis, attention: str, *, balanced: bool) -> Callable[..., Any]:
    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        causal = bool(module.is_causal if is_causal is None else is_causal)
        changed = [name for name in _CHANGES_SCORES if others.get(name) is not None]
        changed += ["a mask of its own"] if attention_mask is not None else []
        changed += ["dropout"] if dropout and attention == "ring" else []
        if sliding_window is not None and causal and sliding_window < key.shape[2] * axis.size:
            changed.append(f"a window of {sliding_window} positions")
        if changed:
            raise ConfigError(f"{type(module).__name__} with {', '.join(changed)} does not work with cp={axis.size}")
        if attention == "ring":
            out = ring_attention(query, key, value, axis, causal=causal, balanced=balanced, scale=scaling)
        else:
            out = ulysses_attention(query, key, value, axis, causal=causal, scale=scaling, dropout=dropout)
        return out.transpose(1, 2).contiguous(), None

    return attend


def _share_sequences(model: nn.Module, axis: Axis, *, balanced: bool) -> None:
    """Take this rank's part of what the model is called with, and make its loss that of the whole."""
    has_labels: list[bool] = []
    parameters = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]

    @private.not_traced
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        has_labels[:] = [given.get("labels") is not None]
        return (), _parts(module, given, axis, balanced=balanced)

    @private.not_traced
    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not any(has_labels):
            return output
        if isinstance(output, tuple):
            return (_mean_over_ranks(output[0], axis), *output[1:])
        output.loss = _mean_over_ranks(output.loss, axis)
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


def _parts(model: nn.Module, given: dict[str, Any], axis: Axis, *, balanced: bool) -> dict[str, Any]:
    """What a rank's call of the model takes."""
    whole = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if whole is None:
        raise ConfigError("context parallelism: the model was called without input_ids or inputs_embeds")
    length = whole.shape[1]
    taken: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SPLIT and value is not None:
            taken[name] = part_of_sequence(value, axis, 1, balanced=balanced, unit=name)
        elif name == "attention_mask":
            _check_mask(value, balanced=balanced)
        elif name in ("labels", *_WITHOUT_EFFECT) or value is None or isinstance(value, bool):
            taken[name] = value
        else:
            raise ConfigError(f"context parallelism: it is not known how the ranks of a sequence share {name!r}")
    taken["use_cache"] = False
    if taken.get("position_ids") is None:
        positions = positions_of_part(length, axis, balanced=balanced, device=whole.device)
        taken["position_ids"] = positions.unsqueeze(0).expand(whole.shape[0], -1)
    if given.get("labels") is not None:
        taken |= _labels(model, given, axis, balanced=balanced)
    return taken


def _check_mask(mask: torch.Tensor | None, *, balanced: bool) -> None:
    """Padding behind a causal sequence hides nothing that anyone would see; any other mask would be needed."""
    if mask is None:
        return
    is_harmless = mask.dim() == 2 and bool(mask.all() if not balanced else (mask[:, 1:] <= mask[:, :-1]).all())
    if not is_harmless:
        raise ConfigError(
            f"context parallelism: an attention_mask of shape {tuple(mask.shape)} hides more than padding behind a "
            "causal sequence; pad on the right, and leave the mask out"
        )


def _labels(model: nn.Module, given: dict[str, Any], axis: Axis, *, balanced: bool) -> dict[str, Any]:
    """Each position's label is the next token, which may be another rank's; each rank divides its sum of losses so that
    their mean over the ranks is the mean over all labels.
    """
    if not knows_causal_loss(model):
        raise ConfigError(
            f"context parallelism: the loss of {type(model).__name__} is not known to be a mean over positions; leave "
            "labels out, and take the loss of the outputs and of part_of_sequence(labels, ...)"
        )
    shifted = F.pad(given["labels"], (0, 1), value=_IGNORED)[:, 1:]
    total = given.get("num_items_in_batch")
    total = (shifted != _IGNORED).sum() if total is None else total
    mine = part_of_sequence(shifted, axis, 1, balanced=balanced, unit="labels").contiguous()
    return {"labels": mine, "shift_labels": mine, "num_items_in_batch": total / axis.size}


def _mean_over_ranks(loss: torch.Tensor, axis: Axis) -> torch.Tensor:
    mean: torch.Tensor = _Mean.apply(loss, axis)
    return mean


class _Mean(torch.autograd.Function):
    """The mean over ranks, whose gradients are averaged over the same ranks: each one's own passes unchanged."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, axis: Axis) -> torch.Tensor:
        total = loss.detach().clone()
        comm.sum_tensor(total, axis, "loss").wait()
        return total.div_(axis.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None
