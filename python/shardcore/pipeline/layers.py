"""From what a user passes as a model to a chain of layers, and from there to stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardcore import plan
from shardcore.errors import ConfigError
from shardcore.pipeline.model_part import ModelPart
from shardcore.pipeline.randomness import build_seed
from shardcore.pipeline.specs import LayerSpec, TiedLayerSpec, call
from shardcore.pipeline.transformers_model import is_transformers_model, parts_of

Partition = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Layer:
    """One link of the chain, on every rank; ``source`` is built only on the rank that runs it."""

    name: str
    source: Any
    """A LayerSpec, a module, or any callable."""

    @property
    def class_name(self) -> str:
        """Name of its class, as ``partition="type:..."`` sees it."""
        if isinstance(self.source, (LayerSpec, ModelPart)):
            return self.source.class_name
        return type(self.source).__name__ if isinstance(self.source, nn.Module) else "function"


@dataclass(frozen=True, slots=True)
class BuiltLayer:
    """A layer of this rank: its module (or function), and how it is applied to a value."""

    name: str
    module: Any
    apply: Callable[[Any], Any]
    class_name: str
    """As :attr:`Layer.class_name`."""


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that several layers share."""

    name: str
    members: tuple[tuple[int, str], ...]
    """(index of the layer, the parameter's path in it), in the order of the layers."""


def as_layers(model: Any, device: torch.device | None = None) -> list[Layer]:
    """The chain of layers of an ``nn.Sequential``, of a list of modules, functions and LayerSpecs, or of a Hugging Face
    model.

    Raises:
        ConfigError: anything else, or an entry that cannot be called.
    """
    if isinstance(model, nn.Sequential):
        named: Iterable[tuple[str, Any]] = model.named_children()
    elif isinstance(model, (list, tuple, nn.ModuleList)):
        named = ((str(i), layer) for i, layer in enumerate(model))
    elif is_transformers_model(model):
        named = parts_of(model, device or torch.device("cpu")).items()
    else:
        raise ConfigError(
            f"Pipeline: {type(model).__name__} cannot be cut into stages; pass an nn.Sequential, a Hugging Face model, "
            "or a list of modules, functions and LayerSpecs of which each takes what the one before returns"
        )
    layers = [Layer(name, source) for name, source in named]
    for layer in layers:
        if not (isinstance(layer.source, LayerSpec) or callable(layer.source)):
            raise ConfigError(f"Pipeline: layer {layer.name} is {layer.source!r}, which cannot be called")
    if not layers:
        raise ConfigError("Pipeline: there are no layers")
    return layers


def boundaries_of(layers: Sequence[Layer], partition: Partition, num_stages: int) -> list[int]:
    """``num_stages + 1`` indices: stage i runs the layers from the i-th up to the next.

    Args:
        partition: ``"uniform"``, ``"parameters"`` (by their number), ``"type:REGEX"`` (layers whose class matches,
            evenly), or the boundaries themselves.

    Raises:
        PlanError: fewer layers than stages, boundaries that leave a stage empty, a pattern that matches no layer.
        ConfigError: an unknown method.
    """
    if not isinstance(partition, str):
        boundaries = list(partition)
        if len(boundaries) != num_stages + 1:
            raise ConfigError(
                f"partition={boundaries}: {num_stages} stages have {num_stages + 1} boundaries, got {len(boundaries)}"
            )
        return plan.check_boundaries(boundaries, len(layers))
    if partition == "uniform":
        return plan.partition_uniform(len(layers), num_stages)
    if partition == "parameters":
        return plan.partition_layers([_num_parameters(layer) for layer in layers], num_stages)
    if partition.startswith("type:"):
        pattern = partition.removeprefix("type:")
        return plan.partition_by_class([layer.class_name for layer in layers], pattern, num_stages)
    raise ConfigError(
        f"partition={partition!r}: expected 'uniform', 'parameters', 'profile', 'type:REGEX', or a list of boundaries"
    )


def find_ties(layers: Sequence[Layer]) -> list[Tie]:
    """Parameters that occur in more than one layer: by the key of TiedLayerSpecs, and shared ones of modules."""
    members: dict[str, list[tuple[int, str]]] = {}
    shared: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer.source, TiedLayerSpec):
            for attribute in layer.source.tied_weight_attr:
                members.setdefault(f"{layer.source.key}.{attribute}", []).append((i, attribute))
        elif isinstance(layer.source, nn.Module):
            for path, param in layer.source.named_parameters():
                shared.setdefault(param, []).append((i, path))
    for places in shared.values():
        members[f"{layers[places[0][0]].name}.{places[0][1]}"] = places
    return [Tie(name, tuple(places)) for name, places in sorted(members.items()) if len(places) > 1]


class Builder:
    """Builds the layers of this rank. Tied layers of one rank share their module."""

    def __init__(self, layers: Sequence[Layer], seed: int) -> None:
        self._layers = layers
        self._seed = seed
        self._tied: dict[str, nn.Module] = {}
        self._first_of_key: dict[str, str] = {}
        for layer in layers:
            if isinstance(layer.source, TiedLayerSpec):
                self._first_of_key.setdefault(layer.source.key, layer.name)

    def build(self, index: int) -> BuiltLayer:
        """The layer, from random numbers that depend on the seed and its name alone."""
        layer = self._layers[index]
        source = layer.source
        if isinstance(source, TiedLayerSpec):
            if source.key not in self._tied:
                self._tied[source.key] = self._make(source, self._first_of_key[source.key])
            module: Any = self._tied[source.key]
            if source.forward_fn is not None:
                forward = source.forward_fn
                return BuiltLayer(layer.name, module, lambda value: forward(module, value), layer.class_name)
        else:
            module = self._make(source, layer.name) if isinstance(source, LayerSpec) else source
        return BuiltLayer(layer.name, module, lambda value: call(module, value), layer.class_name)

    def _make(self, spec: LayerSpec, name: str) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(build_seed(self._seed, name))
            return spec.build()


def build_layers(layers: Any, seed: int = 0) -> list[BuiltLayer]:
    """All layers on this rank, as the ranks of a Pipeline with this seed build theirs."""
    chain = as_layers(layers)
    builder = Builder(chain, seed)
    return [builder.build(i) for i in range(len(chain))]


def _num_parameters(layer: Layer) -> int:
    module = layer.source
    if isinstance(module, LayerSpec):
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = module.build()
    return sum(param.numel() for param in module.parameters()) if isinstance(module, nn.Module) else 0
