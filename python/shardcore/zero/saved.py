"""What autograd saved of a unit's parameters is there when backward reads it, by whatever way the backward comes.

A unit's backward normally begins at an output that its forward returned, and ends when the gradients of its inputs
are complete. A tensor that leaves otherwise (``self.aux_loss``, an entry of a list), or comes in hidden in an object,
is not seen there. Hooks on saved tensors see every read, but cost more than all else that a small unit does. So:

- a unit's first backward is watched by such hooks, which gather the unit where it is not there; if that was needed, the
  unit stays watched;
- released parameters show autograd a version that no saved tensor has, so that an unforeseen read raises, instead of
  reading memory that is gone. The error names the unit; all are watched once more, this one from then on.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.protocols import RELEASED_VERSION

if TYPE_CHECKING:
    from shardcore.zero.group import ShardGroup
    from shardcore.zero.root import Unit

_VERSION = re.compile(r"is at version (\d+)")

_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, ShardGroup] = weakref.WeakValueDictionary()


class VersionCounters:
    """How often each parameter of one group was written to, as autograd counts it. While the memory is gone, autograd
    sees a mark in the counters' place, on the parameters and on all views of them that it saved.
    """

    def __init__(self, group: ShardGroup) -> None:
        number = next(_numbers)
        _groups[number] = group
        self._params = [slot.param for slot in group.slots]
        self._mark = [RELEASED_VERSION + number] * len(self._params)
        self._hidden: list[int] | None = None

    def now(self) -> list[int]:
        """The counters, also while they are hidden."""
        return private.versions(self._params) if self._hidden is None else list(self._hidden)

    def count_write(self, index: int | None = None) -> None:
        """A parameter (all, if none is named) got new values in a way that autograd does not see: graphs that saved it
        must refuse their backward.
        """
        if self._hidden is not None:
            self._hidden = [v + (index in (None, i)) for i, v in enumerate(self._hidden)]
        else:
            torch.autograd.graph.increment_version(self._params if index is None else self._params[index])

    def hide(self) -> None:
        """The memory is about to go."""
        self._hidden = self.now()
        private.set_versions(self._params, self._mark)

    def show(self) -> None:
        """The memory holds the parameters again."""
        if self._hidden is not None:
            private.set_versions(self._params, self._hidden)
            self._hidden = None


def explain_released(error: RuntimeError) -> StateError | None:
    """What to say if autograd met a released parameter's version. All units are watched anew, its own for good."""
    found = _VERSION.search(str(error))
    group = None if found is None else _groups.get(int(found[1]) - RELEASED_VERSION)
    if group is None:
        return None
    users = [unit for unit in group.root.units if group in unit.groups]
    for unit in users:
        unit.has_hidden_ways = True
    for unit in group.root.units:
        unit.is_watched = True  # others of its kind may come next
    names = " and ".join(repr(unit.name) for unit in users)
    return StateError(
        f"backward needs the parameters of unit {names} (stage {group.policy.stage}), which are released: a tensor "
        "left its forward other than by the return value (an attribute, a list), or came in inside an object, and did "
        "not do so in the unit's first backward. Return and pass such tensors; or call reset_iteration() and repeat "
        "the step: the unit is watched from now on. If the tensor was computed from parameters inside "
        "shardcore.summon(model), as a penalty on weights is, call its backward inside summon, too"
    )


class _Saved(NamedTuple):
    """What autograd keeps of one tensor."""

    tensor: torch.Tensor
    version: int
    is_parameter: bool


class Watch:
    """Hooks on what autograd saves in one call of a unit's forward."""

    def __init__(self, unit: Unit, begin_backward: Callable[[], None]) -> None:
        self._unit = unit
        self._begin_backward = begin_backward
        self._is_on = False

    def start(self) -> None:
        """Begin, unless hooks that pack tensors their own way (checkpointing, offloading) are in force."""
        top = private.top_saved_tensor_hooks()
        is_free = top is None or isinstance(getattr(top[0], "__self__", None), Watch)
        if not is_free or not private.may_hook_saved_tensors():
            return
        if private.is_compiled(self._unit.module):  # a compiled graph saves what it was compiled to save
            self._unit.is_watched = False
            return
        private.push_saved_tensor_hooks(self._pack, self._unpack)
        self._is_on = self._unit.was_watched = True

    def stop(self) -> None:
        """The forward has returned, or failed."""
        top = private.top_saved_tensor_hooks() if self._is_on else None
        if top is not None and getattr(top[0], "__self__", None) is self:
            private.pop_saved_tensor_hooks()
        self._is_on = False

    @private.not_traced
    def _pack(self, tensor: torch.Tensor) -> _Saved:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        shown = private.storage_id(tensor) if is_plain else 0
        held = any(shown == private.storage_id(group.full) for group in self._unit.groups)
        return _Saved(tensor.detach(), private.version(tensor), held)

    @private.not_traced
    def _unpack(self, saved: _Saved) -> torch.Tensor:
        unit = self._unit
        if saved.is_parameter and private.in_backward() and any(unit not in group.holders for group in unit.groups):
            unit.has_hidden_ways = True
            self._begin_backward()
        if private.version(saved.tensor) != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(saved.tensor.shape)} that the forward of {unit.name!r} saved is at version "
                f"{private.version(saved.tensor)}; expected version {saved.version} instead"
            )
        return saved.tensor
