"""Reading a parameter whose data are not here: wait, gather, or say what to call. Never a crash, never a stale value.

A parameter keeps its identity, shape and dtype while its data are away. For that time its class is a guard, a subclass
of its own class whose ``__torch_function__`` sees every operation. Metadata (shape, dtype, grad, ...) pass. Anything
that needs data waits for a gather that is under way; inside the model's forward it gathers; elsewhere it raises
:class:`StateError`. In the hot path the hooks have restored the class before a kernel sees the parameter, so the guard
costs nothing there.

Between passes of the model the guard is on at every stage: setting ``param.grad`` drops the sharded gradient (or says
how to set one), and replacing ``param.data``, as casts and moves of the module do, is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NoReturn

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
_EXTERNAL_USE_HINT = (
    "its data are released outside the model's forward and backward. To read it: "
    "`with shardcore.summon(model): ...` (all ranks together; writeback=True to edit it); this rank's piece: "
    "shardcore.local_shard(param). To call a part of the model by itself, make it a unit: "
    "shardcore.shard(model, units=[...])"
)
_GRAD_HINT = (
    "its whole gradient exists on no rank: call loss.backward() without naming parameters, and read this rank's piece "
    "of the mean gradient after it"
)
_MOVES = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double", "type", "type_as", "pin_memory")
)
_MOVE_HINT = (
    "its data are released outside the model's forward and backward, so it can be neither moved nor cast: move the "
    "model before shardcore.shard(model, ...), and cast it there, too, or by shard(precision=...). To read it: `with "
    "shardcore.summon(model): ...` (all ranks together)"
)


class UnderConstruction:
    """Base of the guards of models that are being built, which act first (:mod:`construction`)."""


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
        if any(issubclass(kind, UnderConstruction) for kind in types):
            return NotImplemented
        sets = _set_attribute(func)
        if sets == "grad":
            return _set_gradient(func, args)
        if sets == "data":
            _check_same_memory(*args)
        if reads_metadata(func):
            return private.plain_call(func, args, kwargs)
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__) and _is_released(args[0]):
            return _describe(args[0])
        for slot in _guarded(args, kwargs):
            answer = slot.group.on_guarded_use(slot, func, args)
            if answer is not None:
                return answer
        return private.plain_call(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saving the object itself: fine where the data are here."""
        if _is_released(self):  # type: ignore[arg-type]
            refuse_pickle(protocol)
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy is an ordinary parameter; one whose data are away cannot be copied."""
        with torch.no_grad():
            values = self.detach().clone()  # type: ignore[attr-defined]  # every guard is also a Parameter
        copied = type(self).__mro__[2](values, requires_grad=self.requires_grad)  # type: ignore[attr-defined]
        memo[id(self)] = copied
        return copied


@cache
def guard_class(cls: type) -> type:
    """The guard for parameters of class ``cls``; one per class, so that a parameter's class can be swapped."""
    return type(f"Released{cls.__name__}", (Guard, cls), {"__module__": cls.__module__})


def refuse_pickle(protocol: Any) -> NoReturn:
    """For ``__reduce_ex__`` of what is sharded.

    Raises:
        StateError: always; it says what to save instead.
    """
    raise StateError(
        "a sharded model cannot be pickled (torch.save(model), multiprocessing, ...), since this rank has only a part: "
        "save its weights, weights = shardcore.state_dict(model) on all ranks, then torch.save(weights, path) on rank 0"
    )


def explain_use(func: Callable[..., Any]) -> str:
    """The name of a use of a parameter whose data are away, and what to do instead."""
    name = attribute_of(func, "__get__", "__set__") or getattr(func, "__name__", str(func))
    hint = _MOVE_HINT if func in _MOVES else _EXTERNAL_USE_HINT
    if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
        hint = _GRAD_HINT
    return f"'{name}', but {hint}"


def reads_data(func: Callable[..., Any]) -> bool:
    """Whether ``func`` is the reading of ``param.data``."""
    return attribute_of(func, "__get__") == "data"


def replaced_data(name: str) -> str:
    """What to say of a parameter whose data were replaced."""
    return (
        f"the data of parameter {name!r} were replaced after sharding (by param.data = ..., model.to(...), "
        "model.half(), load_state_dict(assign=True), ...), so training would not reach it. Write in place "
        "(param.copy_(...) under torch.no_grad() and shardcore.summon(model, writeback=True)), and move or cast the "
        "model before shardcore.shard"
    )


def attribute_of(func: Callable[..., Any], *accesses: str) -> str:
    """The name of the attribute that ``func`` reads, sets or deletes, if it is such an access."""
    if getattr(func, "__name__", "") not in accesses:
        return ""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _set_attribute(func: Callable[..., Any]) -> str:
    return attribute_of(func, "__set__", "__delete__")


def _set_gradient(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``param.grad = value`` or ``del param.grad``: what the user means for the sharded gradient."""
    slot = find_slot(args[0])
    value = args[1] if len(args) > 1 else None
    grads = None if slot is None else slot.group.grads
    if slot is None or grads is None or (value is None and grads.exposed):
        return private.plain_call(func, args, None)
    if not grads.exposed and args[0].grad is not None:
        return private.plain_call(func, args, None)  # by a hook, which sees the gradient that backward just brought
    slot.group.root.check_here("lp_grads", "contiguous_grad_buffer", what=f"setting the gradient of {slot.name!r}")
    if value is None:
        return grads.drop(slot.index)
    if grads.exposed:
        root = slot.group.root
        return grads.set_shown(slot.index, value.clone() if root.shows(value) else value)
    raise StateError(
        f"the gradient of parameter {slot.name!r} (stage {slot.group.policy.stage}) is not on the parameter, and one "
        "set there would not be used: all ranks call shardcore.zero.set_full_grad(param, value) (safe_set_full_grad)"
    )


def _check_same_memory(param: torch.Tensor, value: torch.Tensor) -> None:
    """Setting ``param.data`` to what it is already is harmless, as moves to the same device do it."""
    slot = find_slot(param)
    if slot is None or slot.group.releases:
        return  # the reading refuses it
    with private.without_torch_function():
        same = value.data_ptr() == param.data_ptr() and (value.dtype, value.shape) == (param.dtype, param.shape)
    if not same:
        raise StateError(replaced_data(slot.name))


def _is_released(param: torch.Tensor) -> bool:
    slot = find_slot(param)
    return slot is None or (slot.group.releases and not slot.group.pins)


def reads_metadata(func: Callable[..., Any]) -> bool:
    """Whether ``func`` needs no data."""
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
