"""What a Hugging Face model says of itself: its plan for tensor parallelism, its vocabulary, its loss.

transformers is not imported: a model is asked for what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardcore.tensor.layers import ColumnParallelLinear
from shardcore.tensor.loss import cross_entropy
from shardcore.tensor.regions import Region

_COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output")
_ROWS = ("rowwise", "packed_rowwise", "rowwise_split_input")
_PARTIAL = "replicated_with_grad_allreduce"

_KNOWN_CLASSES = (
    "BertIntermediate",
    "BertSelfAttention",
    "ElectraIntermediate",
    "ElectraSelfAttention",
    "GPT2Attention",
    "GPT2MLP",
    "OPTAttention",
    "OPTDecoderLayer",
    "RobertaIntermediate",
    "RobertaSelfAttention",
    "XLMRobertaIntermediate",
    "XLMRobertaSelfAttention",
)
"""Classes of transformers without a plan of their own whose forward takes its number of heads or hidden features from
its tensors, or from attributes that are changed with the weights.
"""
_KNOWN_ORDERS = ("GPT2", "GPTNeoX", "Phi3")
"""Beginnings of classes in whose fused weight the order of query, key and value is known."""


def is_from_transformers(module: nn.Module) -> bool:
    """Whether its class is one of the library's."""
    return type(module).__module__.startswith("transformers.")


def own_plan(model: nn.Module) -> dict[str, str]:
    """The model's own plan, patterns of module names to styles; empty where it has none."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if plan and hasattr(module, "config"):
            prefix = f"{name}." if name else ""
            found.update({prefix + pattern: style for pattern, style in plan.items()})
    if not found:
        base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        found.update({prefix + pattern: style for pattern, style in base.items()})
    return found


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """What the model's own plan says of a module."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def why_not_vouched(region: Region, plan: dict[str, str]) -> str:
    """Why the model itself does not say that this block may be split; empty where it does."""
    is_known = type(region.module).__name__ in _KNOWN_CLASSES and is_from_transformers(region.module)
    entering = [style_of(each.name, plan) for each in region.entering]
    leaving = None if region.leaving is None else style_of(region.leaving.name, plan)
    if not is_known and (not all(style in _COLUMNS for style in entering) or leaving not in _ROWS):
        return "the model's own plan does not split it"
    kind = type(region.module).__name__
    if region.kind == "attention" and len(entering) == 1 and not kind.startswith(_KNOWN_ORDERS):
        return f"the order of heads in the fused weight of {kind} is not known"
    if is_known and region.kind == "perceptron":
        region.inner = []  # its module may be a whole block; what is there besides does not work on hidden features
    for name, _ in region.inner:
        if style_of(name, plan) != _PARTIAL:
            return f"{name} inside of it is not known to work on a part"
    return ""


def vocabulary_layers(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The model's token embedding and its output projection, where it tells."""
    found = []
    for ask in ("get_input_embeddings", "get_output_embeddings"):
        method = getattr(model, ask, None)
        try:
            layer = method() if callable(method) else None
        except (AttributeError, NotImplementedError):
            layer = None
        found.append(layer if isinstance(layer, nn.Module) else None)
    return found[0], found[1]


def causal_loss_of(model: nn.Module) -> Any | None:
    """The model's loss function, if it is the library's for causal language models."""
    loss = getattr(model, "loss_function", None)
    return loss if getattr(loss, "__name__", "") == "ForCausalLMLoss" else None


def knows_causal_loss(model: nn.Module) -> bool:
    """Whether the model's loss is the library's for causal language models, or this module's of split logits."""
    return causal_loss_of(model) is not None or isinstance(getattr(model, "loss_function", None), _CausalLoss)


def split_loss(model: nn.Module, head: ColumnParallelLinear) -> None:
    """While training with labels, leave the logits split, and compute the model's loss from their parts."""
    # The library's own signature; what it passes besides is for its cross-entropy.
    plain = causal_loss_of(model)
    owner: Any = model
    owner.loss_function = _CausalLoss(head, plain)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        head.gather_output = not (module.training and kwargs.get("labels") is not None)

    model.register_forward_pre_hook(before, with_kwargs=True)


class _CausalLoss:
    """Next-token cross-entropy in fp32, as the library's ``ForCausalLMLoss``, of logits that may be split."""

    def __init__(self, head: ColumnParallelLinear, plain: Callable[..., torch.Tensor] | None) -> None:
        self._head = head
        self._plain = plain

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if self._head.gather_output or self._head.axis.size == 1:
            if self._plain is None:
                raise RuntimeError("the model's loss was replaced without one to fall back on")
            return self._plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = torch.as_tensor(shift_labels).reshape(-1).to(logits.device)
        flat = logits.float().reshape(-1, logits.shape[-1])
        options = {key: others[key] for key in ("label_smoothing",) if key in others}
        if num_items_in_batch is None:
            return cross_entropy(flat, target, self._head.axis, vocab_size, ignore_index=ignore_index, **options)
        total = cross_entropy(
            flat, target, self._head.axis, vocab_size, ignore_index=ignore_index, reduction="sum", **options
        )
        return total / num_items_in_batch


def layer_pattern(name: str) -> str:
    """A module's name with the numbers of layers left out, for reports."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


class LocalConfig:
    """A model's configuration as an attention module sees it that has some of the heads only."""

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self.__dict__.update(counts)
        self._whole = config

    def __getattr__(self, name: str) -> Any:
        if name not in ("_whole", "__deepcopy__", "__setstate__"):  # while it is being copied, it has nothing yet
            return getattr(self._whole, name)
        raise AttributeError(name)
