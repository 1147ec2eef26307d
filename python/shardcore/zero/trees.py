"""Finding and replacing the tensors in what modules take and return: nested tuples, lists, mappings, dataclasses,
objects.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, also in attributes of objects that are no containers."""
    return _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The same, without what hangs on containers that were ``seen``, by their identity."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    items = _items(value)
    if items and id(value) not in seen:
        seen.add(id(value))
        for item in items:
            yield from _tensors_in(item, seen)


def _items(value: Any) -> Iterable[Any]:
    """What stands in a container or an object."""
    if isinstance(value, (tuple, list, deque)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        attributes: dict[str, Any] = vars(value)
        return attributes.values()
    return _entries(value).values() if _is_mutable(value) else ()  # a dataclass with slots


class Swaps:
    """What was replaced inside the caller's own containers, to be put back."""

    _containers: list[Any] | None = None
    """None as long as nothing was replaced, which is the rule."""

    def swap(self, container: Any, items: dict[Any, Any]) -> None:
        """Put these items into the container."""
        if self._containers is None:
            self._containers = []
            self._originals: dict[int, tuple[Any, Any]] = {}  # by the replacement's identity; it is kept alive here
        entries = _entries(container)
        self._containers.append(container)
        for key, item in items.items():
            self._originals[id(item)] = (item, entries[key])
            _set(container, key, item)

    def undo(self) -> None:
        """Put the originals back wherever a replacement stands now; what the module has written stays."""
        if self._containers is None:
            return
        for container in self._containers:
            for key, item in _entries(container).items():
                if id(item) in self._originals:
                    _set(container, key, self._originals[id(item)][1])
        # Hooks in autograd's graph, which no garbage collector enters, lead here: what is kept now stays for ever.
        self._containers = None
        del self._originals


def map_tensors(function: Function, value: Any, swaps: Swaps | None = None) -> Any:
    """``value`` with ``function`` applied to its tensors; containers keep their type, and are the same object where no
    tensor changes; unknown objects stay as they are.

    Args:
        swaps: mutable containers are changed in place, and ``swaps.undo()`` puts back what was there; without it they
            are copied where a tensor changes.
    """
    return _map(function, value, swaps, {})


def _map(function: Function, value: Any, swaps: Swaps | None, known: dict[int, Any]) -> Any:
    """The same; ``known`` has what became of each container, by its identity. One that holds itself stays inside."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return _map_tuple(function, value, swaps, known)
    if not _is_mutable(value):
        return value
    if id(value) not in known:
        known[id(value)] = value
        known[id(value)] = _map_mutable(function, value, swaps, known)
    return known[id(value)]


def _map_mutable(function: Function, value: Any, swaps: Swaps | None, known: dict[int, Any]) -> Any:
    entries = _entries(value)
    mapped = {key: _map(function, item, swaps, known) for key, item in entries.items()}
    changed = {key: item for key, item in mapped.items() if item is not entries[key]}
    if not changed:
        return value
    if swaps is not None:
        swaps.swap(value, changed)
        return value
    value = copy.copy(value)
    for key, item in changed.items():
        _set(value, key, item)
    return value


def _map_tuple(function: Function, value: tuple[Any, ...], swaps: Swaps | None, known: dict[int, Any]) -> Any:
    items = [_map(function, item, swaps, known) for item in value]
    if not any(map(operator.is_not, items, value)):
        return value
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # of C, such as torch.return_types
        return kind(items)
    mapped = tuple.__new__(kind, items)  # past constructors of its own, which take what they like
    if hasattr(value, "__dict__"):
        vars(mapped).update(vars(value))
    return mapped


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (list, deque, MutableMapping, SimpleNamespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _entries(container: Any) -> dict[Any, Any]:
    """The items of a container by index, key or attribute."""
    if isinstance(container, (list, deque)):
        return dict(enumerate(container))
    if isinstance(container, MutableMapping):
        return dict(container.items())
    if isinstance(container, SimpleNamespace):
        return dict(vars(container))
    names = [field.name for field in dataclasses.fields(container)]
    return {name: getattr(container, name) for name in names if hasattr(container, name)}


def _set(container: Any, key: Any, item: Any) -> None:
    if isinstance(container, (list, deque, MutableMapping)):
        container[key] = item
    else:
        object.__setattr__(container, key, item)  # also where the dataclass is frozen
