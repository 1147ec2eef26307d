"""Reading a parameter whose data are not here: wait, gather, or say what to call. Never a crash, never a stale value.

A parameter keeps its identity, shape and dtype while its data are away. For that time its class is a guard, a subclass
of its own class whose ``__torch_function__`` sees every operation. Metadata (shape, dtype, grad, ...) pass. Anything
that needs data waits for a gather that is under way; inside the model's forward it gathers; elsewhere it raises
:class:`StateError`. In the hot path the hooks have restored the class before a kernel sees the parameter, so the guard
costs nothing there.

A parameter under construction (:mod:`pieces`) has no slot yet but a piece, whose keeper brings its data for any use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.protocols import ParameterSlot, find_slot

_PIECE_ATTRIBUTE = "_shardcore_piece"
_PLACE_GETTERS = frozenset({"device", "is_meta", "is_cpu", "is_cuda"})
"""Properties that a parameter without memory cannot answer before it has been given some."""
_DATA_GETTERS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA_METHODS = frozenset(
    getattr(torch.Tensor, name)
    for name in [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__len__",
        "__hash__",
        "is_signed",
    ]
)


class Guard:
    """Mixed into a parameter's class while its data are away."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _reads_metadata(func):
            if _attribute(func) in _PLACE_GETTERS:
                _give_memory(args[0])
            return private.plain_call(func, args, kwargs)
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return _describe(args[0])
        built = []
        for value in _guarded(args, kwargs):
            if find_piece(value) is not None:
                built.append(value)
                continue
            answer = _slot_of(value).group.on_guarded_use(_slot_of(value), func)
            if answer is not None:
                return answer
        return _use_under_construction(built, func, args, kwargs) if built else private.plain_call(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the parameter's own class, with data."""
        if isinstance(self, torch.Tensor):
            self.data  # noqa: B018  # brings the data, and ends the guard
        return copy.deepcopy(self, memo)


@cache
def guard_class(cls: type) -> type:
    """The guard for parameters of class ``cls``; one per class, so that a parameter's class can be swapped."""
    return type(f"Released{cls.__name__}", (Guard, cls), {"__module__": cls.__module__})


def guard(tensor: torch.Tensor) -> None:
    """Let the next use of ``tensor`` be noticed."""
    if not isinstance(tensor, Guard):
        tensor.__class__ = guard_class(type(tensor))


def unguard(tensor: torch.Tensor) -> None:
    """Give ``tensor`` its own class back."""
    if isinstance(tensor, Guard):
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


def _use_under_construction(
    params: list[torch.Tensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    keepers = {find_piece(param).keeper: None for param in params}  # type: ignore[union-attr]
    for keeper in keepers:
        keeper.bring([param for param in params if find_piece(param).keeper is keeper])  # type: ignore[union-attr]
    kept = [param for param in params if find_piece(param) is not None]
    result = private.plain_call(func, args, kwargs)
    for keeper in keepers:
        keeper.after_use([param for param in kept if find_piece(param).keeper is keeper], func, result)  # type: ignore[union-attr]
    return result


def _give_memory(tensor: Any) -> None:
    piece = find_piece(tensor)
    if piece is not None and piece.is_empty:
        piece.keeper.bring([tensor])


def _attribute(func: Callable[..., Any]) -> str | None:
    """The name of the property that ``func`` reads or writes; None for any other function."""
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
        return None
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _reads_metadata(func: Callable[..., Any]) -> bool:
    attribute = _attribute(func)
    return func in _METADATA_METHODS if attribute is None else attribute not in _DATA_GETTERS


def _slot_of(param: torch.Tensor) -> ParameterSlot:
    slot = find_slot(param)
    if slot is None:
        raise StateError("this parameter's data were released by a sharded model that no longer exists")
    return slot


def _guarded(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterable[torch.Tensor]:
    """All guarded parameters among the arguments, also inside lists and tuples."""
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, Guard):
            yield value  # type: ignore[misc]  # every guard is also a tensor
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


def _describe(param: torch.Tensor) -> str:
    slot, piece = find_slot(param), find_piece(param)
    if piece is not None:
        return f"<parameter {piece.name} {tuple(param.shape)} {param.dtype}: in pieces until shardcore.shard(model)>"
    name = slot.name if slot is not None else "?"
    state = slot.group.state.value if slot is not None else "away"
    return f"<parameter {name!r} {tuple(param.shape)} {param.dtype}: data {state}; shardcore.summon(model) reads it>"
