"""What a unit's forward is given in place of its inputs, and what it does to them besides computing with them.

A unit gets views of its inputs, whose gradients are complete when its own backward is over. A hook that it puts on an
input means the whole gradient, though, that of all who use the tensor, and a change of shape in place is meant for the
caller's tensor: the first is carried over, the second refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.zero.trees import map_tensors

Hook = Callable[[torch.Tensor], Any]
"""As ``register_hook`` takes it."""


@dataclass(eq=False, slots=True)
class Input:
    """A tensor that takes a gradient, and the view of it that the unit gets, for the time of the forward."""

    original: torch.Tensor
    history: Node | None
    """Where the original came from before the forward."""
    position: int
    """Which output of that it was."""
    alias: torch.Tensor
    hooks: dict[int, Hook]
    """What is put on the view before the forward writes to it in place, by the numbers of handles."""
    end: RemovableHandle | None = None
    """The hook that waits for the view's gradient."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Input:
        """A view of the tensor, with its attributes."""
        alias = tensor.view_as(tensor)
        vars(alias).update(vars(tensor))
        return cls(tensor, tensor.grad_fn, tensor.output_nr, alias, private.hooks_on(alias))

    @property
    def was_written_to(self) -> bool:
        """Whether the forward wrote to it in place."""
        return self.original.grad_fn is not self.history

    def hand_over(self, unit: str) -> None:
        """The forward has returned: carry its hooks and attributes over to the original.

        Raises:
            StateError: it has changed what cannot be carried over, its shape or memory; or its hooks cannot.
        """
        original, alias = self.original, self.alias
        if type(original) is torch.Tensor and _memory_of(original) != _memory_of(alias):
            raise StateError(
                f"the forward of unit {unit!r} gave one of its inputs another shape or other memory in place "
                f"({tuple(original.shape)} is {tuple(alias.shape)} now, by unsqueeze_, resize_, .data = ... or the "
                "like). Units get views of their inputs, so that the caller's tensor stays as it was: return the "
                "changed tensor instead"
            )
        vars(original).update(vars(alias))
        was_written_to = self.was_written_to
        earlier = _take(self.hooks, self.end) if was_written_to else []  # on what it was before
        hooks = _take(private.hooks_on(alias), self.end)
        if (earlier or hooks or alias.retains_grad) and was_written_to and private.is_view(original):
            raise StateError(
                f"the forward of unit {unit!r} wrote in place to an input that is a view (h.t(), h[0], ...) and "
                "hooked its gradient (register_hook, retain_grad), which does not pass through the caller's view then: "
                "write to a copy (x = x.clone())"
            )
        for hook in earlier:
            _put_on_history(self.history, self.position, hook)  # type: ignore[arg-type]
        for hook in hooks:
            original.register_hook(hook)
        if alias.retains_grad:
            _retain_whole(original, alias)


def with_originals(output: Any, inputs: Collection[Input]) -> Any:
    """What a unit returns, with the caller's tensors where it hands its inputs through, so that hooks on them outside
    mean their whole gradients, too.
    """
    if not inputs:
        return output
    originals = {id(each.alias): each.original for each in inputs}
    return map_tensors(lambda tensor: originals.get(id(tensor), tensor), output)


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return private.storage_id(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _take(hooks: dict[int, Hook], own: RemovableHandle | None) -> list[Hook]:
    """These hooks but ``own``, which do nothing where they are any longer; each still obeys its handle."""

    def moved(key: int) -> Hook:
        hook, hooks[key] = hooks[key], lambda grad: None
        return lambda grad: hook(grad) if key in hooks else None

    return [moved(key) for key in hooks if own is None or key != own.id]


def _put_on_history(node: Node, position: int, hook: Hook) -> None:
    """Let a hook act on the gradient of what a tensor was before it was written to in place."""

    def act(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        grad = grads[position]
        changed = None if grad is None else hook(grad)
        return None if changed is None else (*grads[:position], changed, *grads[position + 1 :])

    node.register_prehook(act)


def _retain_whole(original: torch.Tensor, alias: torch.Tensor) -> None:
    """Let ``alias.grad`` be the gradient of the original, over that of its own that torch keeps there before."""
    shown = weakref.ref(alias)  # which leads to this hook by way of the graph
    sums: list[torch.Tensor] = []

    def retain(grad: torch.Tensor) -> None:
        tensor = shown()
        if tensor is not None:
            sums[:] = [grad.clone() if not sums else sums[0] + grad]
            tensor.grad = sums[0]

    original.register_hook(retain)
