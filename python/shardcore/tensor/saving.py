"""``state_dict`` and ``load_state_dict`` of a split model speak of whole parameters, in their own names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardcore.protocols import part_of_whole, splits_of, whole_shape

_MARK = "_shardcore_speaks_of_whole"


def speak_of_whole_parameters(module: nn.Module) -> None:
    """From now on a module's part of ``state_dict()`` is gathered (collective over the tensor axis, and that of
    experts), and loading takes a part.
    """
    if _MARK not in module.__dict__ and next(_split(module), None) is not None:
        object.__setattr__(module, _MARK, True)
        module.register_state_dict_post_hook(_gather)
        module.register_load_state_dict_pre_hook(_take_parts)


def _split(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The module's own parameters of which this rank has a part."""
    for name, param in module.named_parameters(recurse=False):
        if any(not pieces.is_whole for pieces in splits_of(param)):
            yield name, param


def _gather(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, param in _split(module):
        value = state_dict.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):  # keep_vars asks for the parameters themselves
            for pieces in reversed(splits_of(param)):
                value = pieces.assemble(value, prefix + name)
            state_dict[prefix + name] = value


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *others: Any) -> None:
    *_, errors = others
    for name, param in _split(module):
        value, expected = state_dict.get(prefix + name), whole_shape(param)
        if value is None:
            continue
        if tuple(value.shape) == expected:
            state_dict[prefix + name] = part_of_whole(param, value)
        else:
            errors.append(
                f"{prefix + name}: shape {tuple(value.shape)}, expected the whole parameter's {expected}, of which "
                "this rank takes its part"
            )
            del state_dict[prefix + name]
