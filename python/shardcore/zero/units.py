"""Which modules are the units of sharding, and which parameter belongs to which.

A unit is gathered, released and reduced as a whole. A parameter belongs to the nearest unit around the module that
holds it; one that several units hold (tied weights) is a unit of its own, which all of them use. Experts that lie over
the expert axis are units beside that of their block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore.blocks import Units, choose_blocks
from shardcore.errors import ConfigError
from shardcore.protocols import find_experts
from shardcore.zero.leaves import with_leaves

_OWN_UNIT_NUMEL = 1 << 16
"""A module outside all blocks becomes a unit of its own from this size; smaller ones stay with the root."""


@dataclass(eq=False)
class UnitSpec:
    """Parameters that are sharded together, and the modules during whose forward they are used."""

    name: str
    modules: list[nn.Module]
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    holds_experts: bool = False
    """Its parameters lie over the expert axis: they are sharded over fewer ranks than others."""


@dataclass(frozen=True)
class Assignment:
    """The result: units in the order of the model, and every name of every parameter."""

    units: list[UnitSpec]
    names: dict[nn.Parameter, tuple[str, ...]]
    """All names of a parameter, the canonical one first."""


def assign_units(model: nn.Module, units: Units) -> Assignment:
    """Split the model's parameters into units.

    Args:
        units: ``"auto"`` (the largest repeated block classes, Hugging Face's ``_no_split_modules`` first, then by
        size), a
            list of modules, classes or class names, or a function ``(name, module) -> bool``.

    Raises:
        ConfigError: ``units`` names something that is not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    chosen = {model, *choose_blocks(model, units)}
    chosen = with_leaves(model, chosen)
    if units == "auto":
        chosen = with_leaves(model, chosen | _large_leftovers(model, chosen))
    users: dict[nn.Parameter, list[nn.Module]] = {}
    aliases: dict[nn.Parameter, list[str]] = {}
    for owner, name, param in _walk(model, chosen):
        aliases.setdefault(param, []).append(name)
        if owner not in users.setdefault(param, []):
            users[param].append(owner)
    specs: dict[tuple[tuple[nn.Module, ...], bool], UnitSpec] = {}
    for param, owners in users.items():
        is_expert = find_experts(param) is not None
        key = (tuple(owners), is_expert)
        if key not in specs:
            name = "+".join(names[m] or "root" for m in owners) + (" experts" if is_expert else "")
            specs[key] = UnitSpec(name, list(owners), holds_experts=is_expert)
        specs[key].params[aliases[param][0]] = param
    return Assignment(list(specs.values()), {p: tuple(a) for p, a in aliases.items()})


def _walk(model: nn.Module, chosen: set[nn.Module]) -> Iterable[tuple[nn.Module, str, nn.Parameter]]:
    """Every (unit module, full name, parameter), in module order; a tied parameter once for each of its names."""
    pending: list[tuple[nn.Module, str, nn.Module]] = [(model, "", model)]
    seen: set[nn.Module] = set()
    while pending:
        module, prefix, owner = pending.pop()
        owner = module if module in chosen else owner
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, prefix + name, param
        if module in seen:
            continue
        seen.add(module)
        children = [(child, f"{prefix}{name}.", owner) for name, child in module._modules.items() if child is not None]
        pending.extend(reversed(children))


def _large_leftovers(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Modules outside all blocks that hold many parameters themselves, such as an output head."""
    sizes: Counter[nn.Module] = Counter()
    modules = dict(model.named_modules(remove_duplicate=False))
    for owner, name, param in _walk(model, chosen):
        if owner is model:
            sizes[modules[name.rpartition(".")[0]]] += param.numel()
    return {module for module, numel in sizes.items() if numel >= _OWN_UNIT_NUMEL}


def check_parameters(model: nn.Module) -> None:
    """Refuse what cannot be sharded, before anything is changed.

    Raises:
        ConfigError: no parameter, complex or integer parameters, parameters that share memory, embeddings that are
            sparse or rescale their rows, modules compiled by torch.jit.
    """
    params = dict(model.named_parameters())
    if not params:
        raise ConfigError(f"{type(model).__name__} has no parameters; there is nothing to shard")
    for name, param in params.items():
        if not param.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {param.dtype}; only real floating parameters can be sharded. Make it a buffer "
                "or real"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name!r} was compiled by torch.jit, whose code does not see that its parameters move: shard "
                "the plain module, and compile its blocks by block.compile()"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"module {name!r} has sparse=True; sparse gradients are not supported: build it with sparse=False"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"module {name!r} has max_norm={module.max_norm}: its forward rescales the rows that a rank looks up, "
                "so the ranks' copies would part; build it with max_norm=None"
            )
    _refuse_shared_memory(params)


def _refuse_shared_memory(params: dict[str, nn.Parameter]) -> None:
    """Two parameters over the same memory are tied in a way that does not outlast moving them into flat buffers."""
    places = []
    with private.without_torch_function():
        for name, param in params.items():
            if param.numel() and param.device.type != "meta" and param.untyped_storage().nbytes():
                last = sum((length - 1) * stride for length, stride in zip(param.shape, param.stride(), strict=True))
                places.append((param.data_ptr(), param.data_ptr() + (last + 1) * param.element_size(), name))
    places.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        if start < end:
            raise ConfigError(
                f"parameters {name!r} and {other!r} share memory but are two parameters (tied by .data?), and would "
                "be trained apart: tie them by assigning the parameter itself (a.weight = b.weight), or clone one"
            )


def parameter_dtype(param: torch.Tensor) -> str:
    """The dtype's name as plans spell it."""
    return str(param.dtype).removeprefix("torch.")
