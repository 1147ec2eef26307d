"""What happens around the passes of a sharded model: optimizers join, contexts open, states move away and come back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcore import comm
from shardcore.errors import StateError
from shardcore.zero.structure import Structure

if TYPE_CHECKING:
    from shardcore.mesh import Axis
    from shardcore.protocols import ParameterSlot, ShardedOptimizerMark
    from shardcore.zero.group import ShardGroup
    from shardcore.zero.policy import Policy


class Surroundings:
    """Mixed into the root."""

    groups: Sequence[ShardGroup]
    policy: Policy
    data_axis: Axis
    num_passes = 0
    """Backwards and clearings so far: what an optimizer has done to gradients holds until the next."""
    sums_over_tokens = False
    """Losses are sums over target tokens, by whose number each optimizer divides its gradients."""
    backward_running = False
    is_closed = False
    """The engine was destroyed: nothing trains any more."""
    _correction = 1.0

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizers: list[weakref.ref[ShardedOptimizerMark]] = []
        """The optimizers made for this model, the latest last."""
        self.sessions: list[Any] = []
        """Open contexts that show whole parameters, outermost first."""
        self.offloaded: set[str] = set()
        """States that ``offload_states`` has moved away."""
        self.parked: dict[str, list[Any]] = {}
        """Where they are meanwhile."""
        self.before_changes: list[Callable[[], None]] = []
        """Called, and forgotten, before weights or states next change: somebody is still reading them."""
        self.num_tokens: MutableMapping[ShardedOptimizerMark, float | torch.Tensor] = weakref.WeakKeyDictionary()
        """Target tokens of this rank in each optimizer's window."""
        self.structure = Structure(module)
        """What the model was made of when it was sharded."""

    @property
    def is_passing(self) -> bool:
        """Whether a forward or backward runs now."""
        raise NotImplementedError

    @property
    def loss_scale(self) -> float:
        """The factor that backwards apply to the loss."""
        raise NotImplementedError

    def rest(self) -> None:
        """Release what is kept between forward and backward."""
        raise NotImplementedError

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window."""
        raise NotImplementedError

    def watch(self) -> None:
        """Between passes: notice what is done to parameters and their gradients from outside."""
        if not self.policy.shards_params and not self.is_passing:
            for group in self.groups:
                group.watch()

    def check_here(self, *states: str, what: str) -> None:
        """Raise if one of these states (any, if none is named) was moved away by ``offload_states``.

        Raises:
            StateError: names the states, and what brings them back.
        """
        if self.is_closed:
            raise StateError(f"{what}: this engine was destroyed; initialize a new one")
        away = sorted(self.offloaded & set(states) if states else self.offloaded)
        if away:
            raise StateError(
                f"{what} needs {', '.join(away)}, which offload_states moved to the host: call reload_states() first"
            )

    def come_to_rest(self, what: str) -> None:
        """Nothing is under way or away, and masters have what was written to parameters.

        Raises:
            StateError: a pass, or a context that shows whole parameters, is open; or states were moved away.
        """
        if self.is_passing or self.backward_running:
            raise StateError(f"{what} during a forward or backward: finish it, or call reset_iteration() first")
        if self.sessions:
            raise StateError(f"{what} inside summon or GatheredParameters: leave the context first")
        self.check_here(what=what)
        self.rest()
        self.structure.check()
        for group in self.groups:
            group.check_storage()
            group.adopt_edits_if_any()

    def about_to_change(self) -> None:
        """Weights or states are about to change: let those finish who read them."""
        while self.before_changes:
            self.before_changes[0]()  # forgotten only after it: a Ctrl-C must not let the next change pass
            self.before_changes.pop(0)

    def clear_gradients_of(self, slots: Sequence[ParameterSlot], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters; of all trainable ones, as :meth:`clear_gradients`."""
        if len(slots) == sum(len(group.slots) for group in self.groups if group.trainable):
            self.clear_gradients(set_to_none)
            return
        self.check_here("lp_grads", "contiguous_grad_buffer", what="zero_grad of a part")
        self.dropped_gradient = None
        for slot in slots:
            slot.group.grads.drop(slot.index, set_to_none=set_to_none)

    def settle_gradient(self, slot: ParameterSlot) -> bool:
        """Bring the reduced gradient of this parameter's group up to date; returns whether any rank has a gradient for
        the parameter. Collective over the data-parallel axis.
        """
        grads = slot.group.grads
        grads.finish_reduce()
        grads.heed_params()
        flags = torch.tensor([grads.present[slot.index], grads.has_local], dtype=torch.uint8)
        present, local = comm.max_over_ranks(flags, self.data_axis, f"gradient of {slot.name}").tolist()
        if present or local:
            grads.reduce_now(local_anywhere=bool(local))
        return bool(present)

    def gradient_scale(self, slot: ParameterSlot) -> float:
        """By what the reduced gradient of a parameter is multiplied now: the loss scale, until an optimizer took it
        out.
        """
        for optimizer in self.live_optimizers():
            if optimizer.holds(slot.param) and optimizer.has_unscaled(self):
                return 1.0
        return self.loss_scale

    def live_optimizers(self) -> list[ShardedOptimizerMark]:
        """The optimizers made for this model that still exist."""
        found = [reference() for reference in self.optimizers]
        return [optimizer for optimizer in found if optimizer is not None]

    def close(self) -> None:
        """Train no more: gradients are freed, and passes of the model are refused."""
        self.rest()
        for group in self.groups:
            if group.grads is not None:
                group.grads.free()
        self.is_closed = True

    def _unwatch(self) -> None:
        if not self.policy.shards_params:
            for group in self.groups:
                group.unwatch()
