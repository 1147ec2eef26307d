"""What a model's author says of its structure: modules that are one unit, parameters that are used elsewhere.

Both are notes on the modules, which ``zero.shard`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError, StateError
from shardcore.protocols import ParameterSlot, find_root, find_slot

_LEAF = "_shardcore_is_leaf"
_EXTERNAL = "_shardcore_external_parameters"


Leaves = Sequence[type[nn.Module] | str | nn.Module]


def set_leaf_modules(model: nn.Module, classes: Leaves) -> list[nn.Module]:
    """Let each module of these classes be one unit, with everything in it: gathered, released and reduced as a whole,
    whichever of its parts a rank uses (a mixture of experts). Called before ``shard``.

    Args:
        classes: classes, their names, or single modules.

    Returns:
        The modules found.

    Raises:
        ConfigError: the model has no module of these classes (a ValueError).
        StateError: the model is sharded already.
    """
    return _mark(model, classes, is_leaf=True)


def unset_leaf_modules(model: nn.Module, classes: Leaves) -> list[nn.Module]:
    """Take :func:`set_leaf_modules` back for these classes; the same arguments, result and errors."""
    return _mark(model, classes, is_leaf=False)


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that :func:`set_leaf_modules` has marked, in the order of the model."""
    return [module for module in model.modules() if module.__dict__.get(_LEAF, False)]


def with_leaves(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """The chosen unit modules, with the marked leaves and without what lies inside these."""
    leaves = get_leaf_modules(model)
    inside = {part for leaf in leaves for part in leaf.modules() if part is not leaf}
    return (chosen | set(leaves)) - inside


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Say that ``module``'s forward uses ``param``, which another module holds. At stage 3 it is then gathered with the
    module's unit; without this it is gathered when it is used, and from the second step on in time.

    Before ``shard`` the note is kept on the module; ``module`` need not be a unit of its own.

    Raises:
        ConfigError: ``param`` is no parameter, or of another sharded model than ``module``.
    """
    if not isinstance(param, torch.Tensor):
        raise ConfigError(f"register_external_parameter: expected a parameter, got {type(param).__name__}")
    slot = find_slot(param)
    if slot is None:
        noted = module.__dict__.get(_EXTERNAL, ())
        object.__setattr__(module, _EXTERNAL, (*(p for p in noted if p is not param), param))
    else:
        _unit_of(slot, module).add(slot.group)


def unregister_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Take :func:`register_external_parameter` back; nothing where it was not called.

    Raises:
        ConfigError: as there.
    """
    noted = module.__dict__.get(_EXTERNAL, ())
    object.__setattr__(module, _EXTERNAL, tuple(p for p in noted if p is not param))
    slot = find_slot(param)
    if slot is not None:
        _unit_of(slot, module).discard(slot.group)


def add_external_parameters(model: nn.Module) -> None:
    """Follow the notes, once the model is sharded."""
    for module in model.modules():
        for param in module.__dict__.get(_EXTERNAL, ()):
            register_external_parameter(module, param)


def _unit_of(slot: ParameterSlot, module: nn.Module) -> Any:
    """The nearest unit around ``module``."""
    found = None
    modules = dict(slot.group.root.module.named_modules())
    units = {unit.module: unit for unit in slot.group.root.units}
    name = next((name for name, candidate in modules.items() if candidate is module), None)
    if name is not None:
        found = next(units[modules[prefix]] for prefix in _prefixes(name) if modules[prefix] in units)
    if found is None:
        raise ConfigError(
            f"register_external_parameter: {type(module).__name__} is not in the sharded model of parameter "
            f"{slot.name!r}"
        )
    return found


def _prefixes(name: str) -> Iterator[str]:
    """A module's name and those of all modules around it, the innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _mark(model: nn.Module, classes: Leaves, *, is_leaf: bool) -> list[nn.Module]:
    classes = [classes] if isinstance(classes, (str, type)) else list(classes)
    if any(find_root(module) is not None for module in model.modules()):
        raise StateError("leaf modules are set before the model is sharded (before initialize), where units are chosen")
    found = [module for module in model.modules() if _is_any(module, classes)]
    if not found:
        names = [each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__) for each in classes]
        known = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ConfigError(f"no module of the classes {names} in {type(model).__name__}; it has {known}")
    for module in found:
        object.__setattr__(module, _LEAF, is_leaf)
    return found


def _is_any(module: nn.Module, classes: Leaves) -> bool:
    cls = type(module)
    names = (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    kinds = tuple(each for each in classes if isinstance(each, type))
    return isinstance(module, kinds) or any(each is module or each in names for each in classes if each not in kinds)
