"""Which modules of a model are its blocks: the units that are sharded, or computed again, as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardcore.errors import ConfigError

Units = str | Sequence[nn.Module | type[nn.Module] | str] | Callable[[str, nn.Module], bool]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_blocks(model: nn.Module, units: Units) -> set[nn.Module]:
    """The modules of ``model`` that ``units`` names.

    Args:
        units: ``"auto"`` (the largest repeated block classes, Hugging Face's ``_no_split_modules`` first, then by
            size), a list of modules, classes or class names, or a function ``(name, module) -> bool``.

    Raises:
        ConfigError: ``units`` names something that is not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    if isinstance(units, str):
        if units != "auto":
            raise ConfigError(
                f"units={units!r}: expected 'auto', a list of modules, classes or class names, or a function"
            )
        return _choose_auto(model)
    if callable(units):
        return {module for module, name in names.items() if units(name, module)}
    chosen: set[nn.Module] = set()
    for unit in units:
        found = {m for m in names if m is unit or _is_class(m, unit)}
        if not found:
            raise ConfigError(
                f"units: {unit!r} is not in the model {type(model).__name__}; its classes are {_class_names(names)}"
            )
        chosen |= found
    return chosen


def _choose_auto(model: nn.Module) -> set[nn.Module]:
    hints = getattr(model, "_no_split_modules", None) or ()
    chosen = {m for m in model.modules() if type(m).__name__ in hints and _numel(m)}
    while True:
        candidates = _repeated_classes(model, chosen)
        if not candidates:
            return chosen
        chosen |= set(_best(candidates))


@dataclass
class _Repeated:
    """The outermost instances of a class that occurs more than once."""

    depth: int
    """How many modules lie around the first instance."""
    modules: list[nn.Module] = field(default_factory=list)
    num_listed: int = 0
    """Instances that stand in a ModuleList, ModuleDict or Sequential, as the blocks of a network do."""


def _best(candidates: list[_Repeated]) -> list[nn.Module]:
    """The largest class of blocks. A class within a tenth of the largest holds the same parameters, at another level of
    nesting: of these the outermost that stands in a list is the block.
    """
    sizes = [sum(_numel(m) for m in candidate.modules) for candidate in candidates]
    near = [c for c, numel in zip(candidates, sizes, strict=True) if numel >= 0.9 * max(sizes)]
    listed = [candidate for candidate in near if candidate.num_listed > 1]
    return min(listed or near, key=lambda candidate: candidate.depth).modules


def _repeated_classes(model: nn.Module, chosen: set[nn.Module]) -> list[_Repeated]:
    """Classes with at least two instances outside ``chosen`` and not around any of them."""
    found: dict[type[nn.Module], _Repeated] = {}

    def visit(module: nn.Module, around: tuple[nn.Module, ...]) -> bool:
        """Returns whether a chosen module lies below (or is) ``module``."""
        if module in chosen:
            return True
        visited = [visit(child, (*around, module)) for child in module.children()]  # all, whatever the first says
        below = any(visited)
        if not below and around and not _is_plain_container(module, around[-1]) and _numel(module):
            cls = type(module)
            if not any(type(outer) is cls for outer in around[1:]):  # the model itself is no block
                repeated = found.setdefault(cls, _Repeated(len(around)))
                repeated.modules.append(module)
                repeated.num_listed += isinstance(around[-1], _CONTAINERS)
        return below

    visit(model, ())
    return [repeated for repeated in found.values() if len(set(repeated.modules)) > 1]


def _is_plain_container(module: nn.Module, parent: nn.Module) -> bool:
    """A list of modules is no block; a plain Sequential is one where it stands in a list itself."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return type(module) is nn.Sequential and not isinstance(parent, _CONTAINERS)


def _is_class(module: nn.Module, unit: object) -> bool:
    if isinstance(unit, str):
        return type(module).__name__ == unit
    return isinstance(unit, type) and isinstance(module, unit)


def _class_names(names: Iterable[nn.Module]) -> str:
    return ", ".join(sorted({type(module).__name__ for module in names}))


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
