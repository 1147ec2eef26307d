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
from shardcore.pipeline.model_blocks import parts_of_blocks
from shardcore.pipeline.model_part import ModelPart

HIDDEN = "inputs_embeds"


def is_transformers_model(model: Any) -> bool:
    """Whether it is a Hugging Face model."""
    return isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "base_model_prefix")


def parts_of(model: Any, device: torch.device) -> dict[str, ModelPart]:
    """The links by name: the embedding, each block, and the head with what precedes it. By the model's plan, where it
    has one of this form, else by :func:`parts_of_blocks`.

    Raises:
        ConfigError: it cannot be cut by itself.
    """
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    base = getattr(model, prefix) if prefix else model
    names = list(getattr(model.config, "base_model_pp_plan", None) or ())
    if len(names) < 2 or not isinstance(getattr(base, names[1], None), nn.ModuleList):
        return parts_of_blocks(model, device)
    return _parts_of_plan(model, prefix, names, device)


def _parts_of_plan(model: Any, prefix: str, names: list[str], device: torch.device) -> dict[str, ModelPart]:
    base = getattr(model, prefix) if prefix else model
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
        links[f"{dot}{blocks}.{i}"] = ModelPart({f"{dot}{blocks}.{i}": block}, _run(inner), inner)
    last = {name: getattr(base, name) for name in after}
    inner = _without(bare, [], {blocks: nn.ModuleList(), **last})
    heads = {name: child for name, child in model._modules.items() if child is not base and child is not None}
    parts = {f"{dot}{name}": module for name, module in last.items()} | (heads if prefix else {})
    if not parts:
        raise ConfigError(f"Pipeline: nothing follows the blocks of {type(model).__name__}; pass a list of layers")
    outer = _without(model, [], {prefix: inner}) if prefix else inner
    links[next(reversed(parts))] = ModelPart(parts, _finish(outer), outer)
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
