"""A Hugging Face model as a chain of layers, by the pipeline plan that its configuration holds.

``base_model_pp_plan`` names what precedes the blocks, the list of blocks and what follows. Each link of the chain runs
the model's own forward with everything else taken out of it, so masks, positions and rotary embeddings are the model's
own. What the model does to embeddings before its first block (dropout, a factor, learned positions) happens in the
first link alone: the others run that code on a stand-in of the same shape, and hand their block the hidden state that
came from the link before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError
from shardcore.pipeline.model_blocks import parts_of_blocks
from shardcore.pipeline.model_part import ModelPart
from shardcore.protocols import splits_sequence

HIDDEN, LENGTH = "inputs_embeds", "length of the whole sequence"
_OTHER_PLANS: dict[str, list[str]] = {"GPT2Model": ["wte", "wpe", "drop", "h", "ln_f"]}
"""Of base models whose configuration has no plan, though they are a chain."""


def is_transformers_model(model: Any) -> bool:
    """Whether it is a Hugging Face model."""
    return isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "base_model_prefix")


def parts_of(model: Any, device: torch.device) -> dict[str, ModelPart]:
    """The links by name: what precedes the blocks, each block, and the head with what precedes it. By the model's plan,
    where it has one, else by :func:`parts_of_blocks`.

    Raises:
        ConfigError: the plan has no embedding or no list of blocks, or nothing follows the blocks; or there is no plan,
            and the model cannot be cut without, or its activations are split along the sequence.
    """
    if _plan_of(model):
        return _parts_of_plan(model, device)
    if splits_sequence(model):
        raise ConfigError(
            f"Pipeline: the activations of {type(model).__name__}, which has no pipeline plan, are split along the "
            "sequence from its first block to its last, which no stage has all of; call shardcore.tensor.parallelize "
            "without sequence"
        )
    return parts_of_blocks(model, device)


def _parts_of_plan(model: Any, device: torch.device) -> dict[str, ModelPart]:
    base, prefix = _base_of(model)
    before, blocks, after = _checked_plan(model, base)
    dot = f"{prefix}." if prefix else ""
    bare = _without(base, [*before, blocks, *after])
    for child in bare._modules.values():
        if child is not None:
            child.to(device)  # what every link uses: rotary embeddings
    own = {name: getattr(base, name) for name in before}
    passed = {name: _Zero() if isinstance(module, nn.Embedding) else nn.Identity() for name, module in own.items()}
    identities = {name: nn.Identity() for name in after}
    inner = _without(bare, [], {**own, blocks: nn.ModuleList(), **identities})
    act = _embed(inner, _used_first(base), splits=splits_sequence(model))
    links = {f"{dot}{before[0]}": ModelPart({f"{dot}{n}": m for n, m in own.items()}, act)}
    for i, block in enumerate(getattr(base, blocks)):
        fed = _Fed(block)
        inner = _without(bare, [], {**passed, blocks: nn.ModuleList([fed]), **identities})
        _see_one_layer(inner, i)
        links[f"{dot}{blocks}.{i}"] = ModelPart({f"{dot}{blocks}.{i}": block}, _run(inner, fed))
    last = {name: getattr(base, name) for name in after}
    fed = _FedNorm(last[after[0]])
    inner = _without(bare, [], {**passed, blocks: nn.ModuleList(), **last, after[0]: fed})
    heads = {name: child for name, child in model._modules.items() if child is not base and child is not None}
    parts = {f"{dot}{name}": module for name, module in last.items()} | (heads if prefix else {})
    outer = _without(model, [], {prefix: inner}) if prefix else inner
    links[next(reversed(parts))] = ModelPart(parts, _finish(outer, fed))
    return links


def _base_of(model: Any) -> tuple[Any, str]:
    """The model without its head, and its name in the model; "" where it is the model itself."""
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    return (getattr(model, prefix) if prefix else model), prefix


def _plan_of(model: Any) -> list[str]:
    """Names of the base model's parts in their order; empty where it is not known."""
    own = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    base, _ = _base_of(model)
    known = _OTHER_PLANS.get(type(base).__name__, []) if type(base).__module__.startswith("transformers.") else []
    return list(own or known)


def _checked_plan(model: Any, base: Any) -> tuple[list[str], str, list[str]]:
    """What precedes the blocks, the list of blocks, what follows."""
    names = _plan_of(model)
    lists = [i for i, name in enumerate(names) if isinstance(getattr(base, name, None), nn.ModuleList)]
    missing = [name for name in names if not isinstance(getattr(base, name, None), nn.Module)]
    if len(lists) != 1 or not 0 < lists[0] < len(names) - 1 or missing:
        raise ConfigError(
            f"Pipeline: the plan of {type(model).__name__} is {names}; expected an embedding, one list of blocks, and "
            "what follows. Pass a list of layers instead"
        )
    return names[: lists[0]], names[lists[0]], names[lists[0] + 1 :]


def _used_first(base: Any) -> set[str]:
    """Arguments that only what precedes the blocks takes."""
    return {"input_ids", "token_type_ids"} if type(base).__name__ in _OTHER_PLANS else {"input_ids"}


def _see_one_layer(inner: Any, index: int) -> None:
    """Models read from their configuration what kind the i-th block of the list is; here it is the only one."""
    kinds = getattr(inner.config, "layer_types", None)
    if kinds:
        inner.__dict__["config"] = copy.copy(inner.config)
        inner.config.__dict__["layer_types"] = [kinds[index]]


class _Zero(nn.Module):
    """Stands in for learned positions that the first link has added."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A zero, whatever the ids."""
        return torch.zeros((), device=ids.device)


class _Fed(nn.Module):
    """Stands in the model for one of its modules: calls that on what came from the link before, and keeps the result.

    The model sees a stand-in before and after, whose sequence is whole also where each tensor-parallel rank has a part
    of the real one.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.hidden: torch.Tensor | None = None
        """[batch, sequence, features] what goes in; then what came out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stand-in, in the form of the module's output."""
        hidden, self.hidden = self.hidden, None
        if args:
            stand_in, output = args[0], self.module(hidden, *args[1:], **kwargs)
        else:
            stand_in, output = kwargs["hidden_states"], self.module(**{**kwargs, "hidden_states": hidden})
        if isinstance(output, tuple):
            self.hidden = output[0]
            return (stand_in, *output[1:])
        self.hidden = output
        return stand_in

    def call(self, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run the model around it; returns the arguments for the next link."""
        model(**self.feed(arguments), use_cache=False, return_dict=True)
        output, self.hidden = self.hidden, None
        return {**arguments, HIDDEN: output}

    def feed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take the hidden state out of the arguments, and leave a stand-in."""
        arguments = dict(arguments)
        hidden = self.hidden = arguments[HIDDEN]
        shape = (len(hidden), arguments.pop(LENGTH, hidden.shape[1]), *hidden.shape[2:])
        return {**arguments, HIDDEN: hidden.detach().new_zeros(()).expand(shape)}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _FedNorm(_Fed):
    """The last one: what comes after it is real."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        super().forward(*args, **kwargs)
        output, self.hidden = self.hidden, None
        return output


def loss_of(model: Any) -> Callable[[Any, Any], torch.Tensor] | None:
    """The loss that the model computes from logits and labels by itself."""
    function, vocab_size = getattr(model, "loss_function", None), getattr(model.config, "vocab_size", None)
    if function is None:
        return None

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = function(logits=logits, labels=labels, vocab_size=vocab_size)
        return found

    return loss


def _without(module: Any, names: list[str], others: Mapping[str, nn.Module] | None = None) -> Any:
    """A shallow copy that lacks some children and has ``others`` in place of its own."""
    clone: Any = object.__new__(type(module))  # copy.copy would ask the model, which may refuse to be copied
    kept = {name: child for name, child in module._modules.items() if name not in names}
    clone.__dict__.update(module.__dict__, _modules={**kept, **(others or {})})
    return clone


def _embed(inner: Any, left_out: set[str], *, splits: bool) -> Callable[[dict[str, Any]], Any]:
    def act(arguments: dict[str, Any]) -> Any:
        hidden = inner(**arguments, use_cache=False, return_dict=True).last_hidden_state
        left = {name: value for name, value in arguments.items() if name not in left_out}
        return {**left, HIDDEN: hidden, **({LENGTH: hidden.shape[1]} if splits else {})}

    return act


def _run(inner: Any, fed: _Fed) -> Callable[[dict[str, Any]], Any]:
    return lambda arguments: fed.call(inner, arguments)


def _finish(outer: Any, fed: _Fed) -> Callable[[dict[str, Any]], Any]:
    def act(arguments: dict[str, Any]) -> Any:
        output = outer(**fed.feed(arguments), use_cache=False, return_dict=True)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    return act
