"""Gradients on the parameters (stage 0): as users of DDP expect, ``param.grad`` is the mean, and may be replaced.

Between backwards each parameter shows its place in the group's buffer. While one runs, it shows what the backward
brings: the sum of earlier ones may be under reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardcore import _torch_private as private

if TYPE_CHECKING:
    from shardcore.protocols import ParameterSlot


class ShowsGradients:
    """Part of :class:`shardcore.zero.gradients.GroupGradients`."""

    exposed: bool
    present: list[bool]
    _slots: Sequence[ParameterSlot]
    _views: list[torch.Tensor]
    _shown: list[bool]

    def expose(self) -> None:
        """Let ``param.grad`` of every parameter that has one show the buffer (stage 0)."""
        if self.exposed:
            self.heed_params()
            self.show([i for i, present in enumerate(self.present) if present])

    def begin_backward(self) -> None:
        """Until it ends, parameters show what the backward brings, and not the sum of earlier ones, which is being
        reduced meanwhile.
        """
        if not self.exposed:
            return
        self.heed_params()
        dropped = [i for i, shown in enumerate(self._shown) if shown and not self.present[i]]
        self._take_off()
        if dropped and self._is_open():
            self._leave_to_user(keeps_values=True)
            private.zero_all([self._views[i] for i in dropped])

    def take_strays(self) -> list[str]:
        """Forget gradients that were set where nothing notices it: in a forward, in ``summon``, or in a backward by
        something else than the parameter's own hooks. Returns whose.
        """
        with private.without_torch_function():
            grads = [slot.param.grad for slot in self._slots]
            strays = [i for i, grad in enumerate(grads) if grad is not None and not self._shown[i]]
            strays = [i for i in strays if not self.holds(i, grads[i])]  # type: ignore[arg-type]  # those are not None
            for i in strays:
                self._slots[i].param.grad = None
        return [self._slots[i].name for i in strays]

    def set_shown(self, index: int, value: torch.Tensor) -> None:
        """``param.grad = value`` (stage 0): the value counts, as it is when somebody asks for the gradient."""
        with private.without_torch_function():
            self._slots[index].param.grad = value
        self.present[index] = self._shown[index] = True

    def heed_params(self) -> None:
        """Honour what the user has set (stage 0): where ``param.grad`` is None, the parameter counts as without
        gradient; where it shows other memory, that is the gradient.
        """
        found: list[tuple[int, torch.Tensor]] = []
        for i, slot in enumerate(self._slots if self.exposed else ()):
            if not (self.present[i] and self._shown[i]):
                continue
            if slot.param.grad is None:
                self.present[i] = False
            elif not self.holds(i, slot.param.grad):
                found.append((i, slot.param.grad.clone()))  # two parameters may have exchanged theirs
        for i, value in found:
            self._assign(i, value)

    def hide(self) -> list[int]:
        """Take gradients off the parameters while their memory is away; returns which, for :meth:`show`."""
        self.heed_params()
        with private.without_torch_function():
            shown = [i for i, slot in enumerate(self._slots) if self.exposed and slot.param.grad is not None]
        self._take_off()
        return shown

    def show(self, indices: Sequence[int]) -> None:
        """Put gradients on these parameters. The tensors are the user's, who may give them other memory."""
        with private.without_torch_function():
            for i in indices:
                shown = self._slots[i].param.grad
                if shown is None or not self.holds(i, shown):
                    self._slots[i].param.grad = self._views[i].detach()
                self._shown[i] = True

    def _take_off(self, index: int | None = None) -> None:
        """Let ``param.grad`` be None: of one parameter, or of all."""
        with private.without_torch_function():
            for i, slot in enumerate(self._slots) if index is None else ((index, self._slots[index]),):
                slot.param.grad = None
                self._shown[i] = False

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is the buffer's own memory for the parameter."""
        raise NotImplementedError

    def _assign(self, index: int, value: torch.Tensor) -> None:
        """Let ``value`` be the gradient of a parameter."""
        raise NotImplementedError

    def _is_open(self) -> bool:
        raise NotImplementedError

    def _leave_to_user(self, *, keeps_values: bool) -> None:
        raise NotImplementedError
