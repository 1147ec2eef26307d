"""Reading a parameter whose data are not here: wait, gather, or say what to call. Never a crash, never a stale value.

A parameter keeps its identity, shape and dtype while its data are away. For that time its class is a guard, a subclass
of its own class whose ``__torch_function__`` sees every operation. Metadata (shape, dtype, grad, ...) pass. Anything
that needs data waits for a gather that is under way; inside the model's forward it gathers; elsewhere it raises
:class:`StateError`. In the hot path the hooks have restored the class before a kernel sees the parameter, so the guard
costs nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.protocols import ParameterSlot, find_slot

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
            return private.plain_call(func, args, kwargs)
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return _describe(args[0])
        for slot in _guarded(args, kwargs):
            answer = slot.group.on_guarded_use(slot, func)
            if answer is not None:
                return answer
        return private.plain_call(func, args, kwargs)


@cache
def guard_class(cls: type) -> type:
    """The guard for parameters of class ``cls``; one per class, so that a parameter's class can be swapped."""
    return type(f"Released{cls.__name__}", (Guard, cls), {"__module__": cls.__module__})


def _reads_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _DATA_GETTERS
    return func in _METADATA_METHODS


def _guarded(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterable[ParameterSlot]:
    """The slots of all guarded parameters among the arguments, also inside lists and tuples."""
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, Guard):
            slot = find_slot(value)  # type: ignore[arg-type]  # every guard is also a Parameter
            if slot is None:
                raise StateError("this parameter's data were released by a sharded model that no longer exists")
            yield slot
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


def _describe(param: torch.Tensor) -> str:
    slot = find_slot(param)
    name = slot.name if slot is not None else "?"
    state = slot.group.state.value if slot is not None else "away"
    return f"<parameter {name!r} {tuple(param.shape)} {param.dtype}: data {state}; shardcore.summon(model) reads it>"
