"""A parameter of a model that is being built, while its data are away: the next use of it, whatever it is, brings them.

As in :mod:`guard`, the parameter's class is swapped for that time. What stands for its data is its piece
(:mod:`pieces`), whose keeper brings them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from shardcore import _torch_private as private
from shardcore.zero.guard import UnderConstruction, attribute_of, reads_metadata

_PIECE_ATTRIBUTE = "_shardcore_piece"
_PLACE_GETTERS = frozenset({"device", "is_meta", "is_cpu", "is_cuda"})
"""Properties that a parameter without memory cannot answer before it has been given some."""


class Away(UnderConstruction):
    """Mixed into the class of a parameter or buffer whose data are away."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if reads_metadata(func):
            piece = find_piece(args[0])
            if piece is not None and piece.is_empty and attribute_of(func, "__get__") in _PLACE_GETTERS:
                piece.keeper.bring([args[0]])
            return private.plain_call(func, args, kwargs)
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return _describe(args[0])
        used = list(_away(args, kwargs))
        keepers = {find_piece(tensor).keeper: None for tensor in used}  # type: ignore[union-attr]
        for keeper in keepers:
            keeper.bring([tensor for tensor in used if _belongs(tensor, keeper)])
        result = func(*args, **(kwargs or {}))
        for keeper in keepers:
            keeper.after_use([tensor for tensor in used if _belongs(tensor, keeper)], func)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the tensor's own class, with data."""
        self.data  # type: ignore[attr-defined]  # noqa: B018  # brings the data, and ends the guard
        return copy.deepcopy(self, memo)


@cache
def _away_class(cls: type) -> type:
    return type(f"Built{cls.__name__}", (Away, cls), {"__module__": cls.__module__})


def notice_uses(tensor: torch.Tensor) -> None:
    """Let the next use of ``tensor`` be noticed."""
    if not isinstance(tensor, Away):
        private.before_any_parameter(_bring_to_be_shared)
        tensor.__class__ = _away_class(type(tensor))


def stop_noticing(tensor: torch.Tensor) -> None:
    """Give ``tensor`` its own class back."""
    if isinstance(tensor, Away):
        tensor.__class__ = type(tensor).__bases__[1]


def attach_piece(tensor: torch.Tensor, piece: Any) -> None:
    """Leave the piece that stands for the data of a parameter under construction."""
    tensor.__dict__[_PIECE_ATTRIBUTE] = piece


def find_piece(tensor: Any) -> Any | None:
    """The piece of a parameter under construction, or None for any other."""
    return tensor.__dict__.get(_PIECE_ATTRIBUTE)


def detach_piece(tensor: torch.Tensor) -> None:
    """The parameter is no longer under construction."""
    tensor.__dict__.pop(_PIECE_ATTRIBUTE, None)


def _bring_to_be_shared(data: torch.Tensor) -> None:
    """Before a parameter is made of ``data``, whose memory it will show."""
    piece = find_piece(data) if isinstance(data, Away) else None
    if piece is not None:
        piece.keeper.bring([data])


def _belongs(tensor: torch.Tensor, keeper: Any) -> bool:
    piece = find_piece(tensor)
    return piece is not None and piece.keeper is keeper


def _away(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterable[torch.Tensor]:
    """All tensors among the arguments whose data are away, also inside lists and tuples."""
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, Away):
            yield value  # type: ignore[misc]  # they are tensors, too
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


def _describe(tensor: torch.Tensor) -> str:
    piece = find_piece(tensor)
    name = piece.name if piece is not None else "?"
    return f"<parameter {name} {tuple(tensor.shape)} {tensor.dtype}: in pieces until shardcore.shard(model)>"
