"""Finding and replacing the tensors in what modules take and return: nested tuples, lists, mappings, dataclasses,
objects.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, also in attributes of objects that are no containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to its tensors; containers keep their type, unknown objects stay as they
    are.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        instance: Any = value
        mapped = copy.copy(instance)
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(value, field.name)))
        return mapped
    return value
