"""Hooks on parameters: each finished gradient goes into its group's buffer, after the user's own hooks have seen it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

import torch
from torch.autograd.graph import Node, get_gradient_edge

from shardcore import _torch_private as private
from shardcore.errors import StateError
from shardcore.zero.gradients import GroupGradients
from shardcore.zero.group import ShardGroup
from shardcore.zero.root import Root


class GradientHooks:
    """Moves each finished gradient of a group into its buffer, and says when the last one of a backward has come."""

    def __init__(self, root: Root, group: ShardGroup, grads: GroupGradients) -> None:
        self._root = root
        self._group = group
        self._grads = grads
        self._missing: set[int] = set()
        self._backward = -1
        self._shown: dict[int, tuple[torch.Tensor | None, int]] = {}
        """Of a parameter whose hooks run: a copy of what they may not change, and how often it had been written to."""
        self.on_complete: list[Callable[[], None]] = []
        """Called when no gradient of the group is still to come in the running backward."""
        group.unshard()
        self._nodes: list[Node] = [get_gradient_edge(slot.param).node for slot in group.slots]
        group.reshard()
        for slot in group.slots:
            show, take = (self._hook(slot.index, act) for act in (GradientHooks._show, GradientHooks._take))
            private.ClosingHooks(slot.param, before=show, closing=take)

    def is_complete(self) -> bool:
        """Whether no gradient of the group is still to come in the running backward."""
        if self._backward != private.backward_id():
            self._backward = private.backward_id()
            self._missing = {i for i, node in enumerate(self._nodes) if private.backward_will_execute(node)}
        return not self._missing

    def _hook(self, index: int, act: Callable[[GradientHooks, int, torch.Tensor], None]) -> Callable[..., None]:
        # The garbage collector cannot look into a tensor's hooks while autograd nodes refer to the tensor, so a hook
        # that held its model would keep it for ever.
        hooks = weakref.ref(self)

        @private.not_traced
        def on_gradient(param: torch.Tensor) -> None:
            alive = hooks()
            if alive is not None:
                act(alive, index, param)

        return on_gradient

    def _show(self, index: int, param: torch.Tensor) -> None:
        """The user's hooks are about to run."""
        has_earlier = self._grads.has_sum[index]
        copied = param.grad.clone() if has_earlier and param.grad is not None else None
        self._shown[index] = (copied, private.version(param))

    def _take(self, index: int, param: torch.Tensor) -> None:
        """Move ``param.grad`` into the group's buffer; start what its completion allows."""
        refuse_double_backward()
        grad = param.grad
        self._check_shown(index, param, grad)
        self._root.begin_backward()
        self.is_complete()
        self._root.window.note_gradient(self._group)
        if grad is not None:
            self._accumulate(index, param, grad)
        elif self._grads.present[index]:  # zeros of zero_grad(set_to_none=False)
            self._grads.drop(index)
        self._missing.discard(index)
        if not self._missing:
            del grad  # the reduction starts without autograd's tensor in memory
            self._root.window.mark_ready(self._group)
            for callback in self.on_complete:
                callback()

    def _accumulate(self, index: int, param: torch.Tensor, grad: torch.Tensor) -> None:
        if self._root.gradient_factor != 1.0:
            grad = self._corrected(index, grad)
        self._grads.accumulate(index, grad)
        if not self._grads.holds(index, grad):
            with private.without_torch_function():  # on a guarded parameter it would mean the gradient just stored
                param.grad = None

    def _check_shown(self, index: int, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Refuse what the user's hooks may not do, since it would be lost or mean something else than in torch."""
        if index not in self._shown:
            return
        copied, num_writes = self._shown.pop(index)
        if private.version(param) != num_writes:
            self._refuse_write(index)
        if copied is not None and (grad is None or not _are_same(grad, copied)):
            self._refuse_change(index)

    def _refuse_write(self, index: int) -> NoReturn:
        raise StateError(
            f"a hook of register_post_accumulate_grad_hook wrote to parameter {self._group.slots[index].name!r} during "
            "backward, when its gradient is this rank's own and not yet the mean over the ranks: update it by "
            "shardcore.optimizer(...).step(), or write after backward, `with shardcore.summon(model, writeback=True)`"
        )

    def _refuse_change(self, index: int) -> NoReturn:
        raise StateError(
            f"a hook of register_post_accumulate_grad_hook changed the gradient of parameter "
            f"{self._group.slots[index].name!r} when the step had earlier ones of it: the hook sees only what came "
            "now; in torch it would change the sum. Change what each backward brings by param.register_hook(...), or "
            "the sum after backward by shardcore.zero.set_full_grad(param, value)"
        )

    def _corrected(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient as if the loss had been scaled for this model."""
        if self._grads.holds(index, grad):  # autograd has added it to earlier ones already
            self._root.wrongly_scaled = self._group.slots[index].name
            return grad
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) * self._root.gradient_factor


def _are_same(grad: torch.Tensor, copied: torch.Tensor) -> bool:
    """To the last bit; a NaN, too, is what it was."""
    if (grad.dtype, grad.shape) != (copied.dtype, copied.shape):
        return False
    return torch.equal(grad.reshape(-1).view(torch.uint8), copied.reshape(-1).view(torch.uint8))


def refuse_double_backward() -> None:
    """A backward that records itself would save released parameters, and gradients that are summed in place."""
    if torch.is_grad_enabled():
        raise StateError(
            "backward(create_graph=True) is not supported through sharded parameters: double backward needs them, and "
            "their gradients, whole and unchanged. At stages 0 to 2 torch.autograd.grad(outputs, inputs, "
            "create_graph=True) works, for a penalty on gradients; else use an unsharded copy of the model"
        )
