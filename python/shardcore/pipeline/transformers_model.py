"""A Hugging Face model as a chain of layers, by the pipeline plan that its configuration holds.

``base_model_pp_plan`` names the embedding, the list of blocks and what follows. Each link of the chain runs the model's
own forward with everything else taken out of it, so masks, positions and rotary embeddings are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError

HIDDEN = "inputs_embeds"


class ModelPart(nn.Module):
    """Some modules of a model, under their names there, and how they act on the keyword arguments that travel."""

    def __init__(self, parts: dict[str, nn.Module], act: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self._modules.update(parts)
        self.class_name = type(next(iter(parts.values()))).__name__
        self._acts = [act]  # in a list, as what it refers to is no child of this module

    def forward(self, value: Any) -> Any:
        """The arguments for the next part, or the logits."""
        return self._acts[0](dict(value) if isinstance(value, Mapping) else {"input_ids": value})


def has_plan(model: Any) -> bool:
    """Whether the model says how it is cut."""
    return isinstance(model, nn.Module) and bool(getattr(getattr(model, "config", None), "base_model_pp_plan", None))


def parts_of(model: Any, device: torch.device) -> dict[str, ModelPart]:
    """The links by name: the embedding, each block, and the head with what precedes it.

    Raises:
        ConfigError: the plan has no embedding or no list of blocks.
    """
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    base = getattr(model, prefix) if prefix else model
    names = list(model.config.base_model_pp_plan)
    lists = [name for name in names if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1 or names.index(lists[0]) != 1:
        raise ConfigError(
            f"Pipeline: the plan of {type(model).__name__} is {names}; expected an embedding, one list of blocks, and "
            "what follows. Pass a list of layers instead"
        )
    embedding, blocks, *after = names
    dot = f"{prefix}." if prefix else ""
    bare = _without(base, names)
    for child in bare._modules.values():
        if child is not None:
            child.to(device)  # what every link uses: rotary embeddings
    embed = getattr(base, embedding)
    links = {f"{dot}{embedding}": ModelPart({f"{dot}{embedding}": embed}, _embed(embed))}
    identities = {name: nn.Identity() for name in after}
    for i, block in enumerate(getattr(base, blocks)):
        inner = _without(bare, [], {blocks: nn.ModuleList([block]), **identities})
        links[f"{dot}{blocks}.{i}"] = ModelPart({f"{dot}{blocks}.{i}": block}, _run(inner))
    last = {name: getattr(base, name) for name in after}
    inner = _without(bare, [], {blocks: nn.ModuleList(), **last})
    heads = {name: child for name, child in model._modules.items() if child is not base and child is not None}
    parts = {f"{dot}{name}": module for name, module in last.items()} | (heads if prefix else {})
    if not parts:
        raise ConfigError(f"Pipeline: nothing follows the blocks of {type(model).__name__}; pass a list of layers")
    outer = _without(model, [], {prefix: inner}) if prefix else inner
    links[next(reversed(parts))] = ModelPart(parts, _finish(outer))
    return links


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


def _embed(embedding: nn.Module) -> Callable[[dict[str, Any]], Any]:
    def act(arguments: dict[str, Any]) -> Any:
        arguments[HIDDEN] = embedding(arguments.pop("input_ids"))
        return arguments

    return act


def _run(inner: Any) -> Callable[[dict[str, Any]], Any]:
    def act(arguments: dict[str, Any]) -> Any:
        output = inner(**arguments, use_cache=False, return_dict=True)
        return {**arguments, HIDDEN: output.last_hidden_state}

    return act


def _finish(outer: Any) -> Callable[[dict[str, Any]], Any]:
    def act(arguments: dict[str, Any]) -> Any:
        output = outer(**arguments, use_cache=False, return_dict=True)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    return act
