"""A sharded model as a whole: its units and groups, where it is in forward or backward, and its optimizer window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import StateError
from shardcore.offload import Offload
from shardcore.zero import scaling
from shardcore.zero.calls import is_running, running_call
from shardcore.zero.group import ShardGroup
from shardcore.zero.prefetch import Phase, Prefetcher, PrefetchLimits, default_limits
from shardcore.zero.surroundings import Surroundings
from shardcore.zero.window import Window

if TYPE_CHECKING:
    from types import FrameType

    from shardcore.mesh import Axis
    from shardcore.protocols import LossScale, ParameterSlot
    from shardcore.zero.policy import Policy, Precision


class Unit:
    """A module whose forward uses a set of groups, with what a running step knows of it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.groups: list[ShardGroup] = []
        self.was_called = False
        """Its forward ran since the last backward ended."""
        self.calls: list[Any] = []
        """Calls of its forward that have not returned, outermost first."""
        self.open_calls: set[Any] = set()
        """Calls whose backward has begun, and whose input gradients are not complete."""
        self.is_watched = True
        """Hooks look after what autograd saves in its forward; see :mod:`shardcore.zero.saved`."""
        self.was_watched = False
        """They did in a forward since the last backward."""
        self.has_hidden_ways = False
        """Backward has reached it by another way than its outputs and inputs; it stays watched."""
        self._borrowed: list[ShardGroup] = []

    def end_pass(self) -> None:
        """A backward has ended, or failed."""
        self.was_called = self.was_watched = False
        self.open_calls.clear()
        self.forget_calls()

    def forget_calls(self) -> None:
        """Calls that have not returned have failed."""
        for call in self.calls:
            call.leave()
        self.calls.clear()

    def add(self, group: ShardGroup) -> None:
        """Use a group of another unit, too."""
        if group not in self.groups:
            self.groups.append(group)
            self._borrowed.append(group)

    def discard(self, group: ShardGroup) -> None:
        """Use it no longer; the unit's own groups stay."""
        if group in self._borrowed:
            self._borrowed.remove(group)
            self.groups.remove(group)


class Root(Surroundings):
    """What ``zero.shard`` leaves on a model; see :class:`shardcore.protocols.ShardedRoot`."""

    offload = Offload()
    """Where states rest."""
    loss_is_scaled = False
    """Whoever runs the backwards (a pipeline) has multiplied the losses itself."""
    gradient_factor = 1.0
    """What gradients of the running backward are multiplied by as they arrive, where another model has decided by what
    the loss was.
    """
    wrongly_scaled: str | None = None
    """A parameter whose gradient in this window could not be corrected so."""
    dropped_gradient: str | None = None
    """A parameter that had a gradient before it was sharded, until gradients are cleared."""
    forward_depth = 0
    _call: FrameType | None = None
    """The outermost call of the module whose forward runs."""
    backward_running = False
    _num_forwards = 0
    """Forwards with gradients since the last backward."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        groups: Sequence[ShardGroup],
        *,
        reduce_order: Sequence[int],
        policy: Policy,
        precision: Precision,
        data_axis: Axis,
        shard_axis: Axis,
        device: torch.device,
        limits: PrefetchLimits | None = None,
    ) -> None:
        super().__init__(module)
        self.units = units
        self.groups = groups
        self.reduce_order = reduce_order
        self.policy = policy
        self.precision = precision
        self.data_axis = data_axis
        self.shard_axis = shard_axis
        self.device = device
        self._program = comm.Program(gathers_in_forward=policy.shards_params)
        self.window = Window(groups, reduce_order, data_axis, policy, self._program)
        self.root_unit = next(unit for unit in units if unit.module is module)
        sixteen_bit = any(g.full.dtype in (torch.float16, torch.bfloat16) for g in groups if g.trainable)
        self.skip_nonfinite = sixteen_bit if precision.skip_nonfinite is None else precision.skip_nonfinite
        self.gradient_hooks: dict[ShardGroup, Any] = {}
        """What ``hooks.install`` put on the parameters, which hold it weakly."""
        self.active: list[Unit] = []
        """Units whose forward is running, outermost first."""
        self.prefetcher = self._make_prefetcher(limits)
        """Gathers and releases parameters where these are sharded."""
        self._loss_scale: LossScale | None = None
        self._error_scale = 1.0
        self.accumulation = 1
        """A loss is divided by this, once, where its backward starts."""
        self.num_micro_batches = 0
        """Micro-batches in the window, where an engine counts them."""
        self._join_groups()

    def _make_prefetcher(self, limits: PrefetchLimits | None) -> Prefetcher | None:
        if not self.policy.shards_params:
            return None
        return Prefetcher(self.groups, limits or self._default_limits(), self._takes_turns)

    @property
    def needs_unit_hooks(self) -> bool:
        """Whether units must act before and after their forward: to gather, to release, to wait for a gather, or to add
        up gradients in the order of the stages that do.
        """
        return self.policy.shards_states or self.data_axis.size > 1

    @property
    def output_scale(self) -> float:
        """By what a loss is multiplied, or its gradient where a backward starts."""
        if self.loss_is_scaled:
            return 1.0
        return self.loss_scale / (1 if self.sums_over_tokens else self.accumulation)

    @property
    def loss_scale(self) -> float:
        """The factor that plain backwards, and the engine's, apply to the loss."""
        return self._loss_scale.scale if self._loss_scale is not None else 1.0

    @property
    def window_correction(self) -> float:
        """By what the gradients of a partial accumulation window are multiplied, so that they are a mean over what
        is in. Known once the window is finished.
        """
        return self._correction

    @property
    def is_passing(self) -> bool:
        """Whether a forward or backward of some model runs now."""
        return self.forward_depth > 0 or private.in_backward()

    def set_loss_scale(self, scale: LossScale) -> None:
        """Use this scale for plain ``loss.backward()`` from now on."""
        self._loss_scale = scale

    def begin_forward(self) -> None:
        """The root module's forward starts; called by its hook."""
        self.check_here("lp_params", what="the model's forward")
        self._end_interrupted_forward()
        if self.forward_depth == 0 and self.backward_running and not private.in_backward():
            self._settle()  # the last backward raised; its gradients, if any, are the user's to clear
        if self.forward_depth == 0:
            self._call = running_call()
            if not self.window.num_backwards and not private.in_backward():
                self._program.begin_forward(with_gradients=torch.is_grad_enabled())
            if self.prefetcher is not None and not private.in_backward():
                self._end_exports()
                self.prefetcher.begin(self._kind_of_forward())
            self._unwatch()
        self.forward_depth += 1

    def end_forward(self, *, failed: bool = False) -> None:
        """The root module's forward ended, or failed."""
        self.forward_depth = max(self.forward_depth - 1, 0)  # 0 before, where it was refused at once
        if self.forward_depth == 0:
            self._call = None
        if self.forward_depth or private.in_backward():
            return
        self.active.clear()
        for unit in self.units:
            unit.forget_calls()
        if failed:
            self._forget_holders()
            self.watch()
            return
        self._release_all_units()
        if self.prefetcher is not None and not torch.is_grad_enabled():
            self.prefetcher.end()
        self.watch()

    def begin_backward(self) -> None:
        """Called by the first hook that fires in a backward."""
        if self.backward_running:
            return
        self.check_here("lp_params", "lp_grads", "contiguous_grad_buffer", what="backward")
        if self.dropped_gradient is not None:
            raise StateError(
                f"parameter {self.dropped_gradient!r} had a gradient before it was sharded, which was dropped then: "
                "call optimizer.zero_grad() before the first backward if that is meant, or step before shardcore.shard"
            )
        self.backward_running = True
        for optimizer in self.live_optimizers():
            optimizer.scale_again(self)
        self.num_passes += 1
        self.gradient_factor = self.output_scale / scaling.running_factor()
        self._unwatch()
        for group in self.groups:
            if group.grads is not None:
                group.grads.begin_backward()
        self._forget_errors_of_another_scale()
        private.queue_backward_callback(self.end_backward)
        used = {group for unit in self.units if unit.was_called for group in unit.groups}
        known = bool(used) and self.needs_unit_hooks
        with private.without_torch_function():
            idle = [g for g in self.groups if g.trainable and ((known and g not in used) or g.is_frozen())]
        if not self.window.num_backwards:
            self._program.begin_backward()
        self.window.begin_backward(idle)
        self.acquire(self.root_unit, "backward")

    def end_backward(self) -> None:
        """Autograd has finished: reduce what is left, release what is whole."""
        self.window.end_backward()
        for unit in self.units:
            unit.is_watched = unit.has_hidden_ways or (unit.is_watched and not unit.was_watched)
        self._settle()
        self.refuse_strays()
        for group in self.groups:
            if group.grads is not None and group.grads.exposed:
                group.grads.finish_reduce()
                group.grads.expose()
        if not self.forward_depth and not self.policy.shards_params:
            for group in self.groups:
                group.watch()

    def shows(self, value: torch.Tensor) -> bool:
        """Whether a tensor is a gradient of a parameter, in a group's own memory."""
        storage = private.storage_id(value)
        return any(
            storage == private.storage_id(full) for g in self.groups if g.grads for full in g.grads.buffers(whole=True)
        )

    def refuse_strays(self) -> None:
        """Forget gradients that were set where nothing here notices it.

        Raises:
            StateError: there were any.
        """
        strays = [name for group in self.groups if group.grads is not None for name in group.grads.take_strays()]
        if strays:
            raise StateError(
                f"the gradient of parameter {strays[0]!r} was set in a forward, in a backward by something else than a "
                "hook of its own, or inside summon, where it would be lost: set it in a hook of "
                "param.register_post_accumulate_grad_hook(...), or between backward and step by "
                "shardcore.zero.set_full_grad(param, value)"
            )

    def finish_gradients(self) -> list[list[bool]]:
        """Reduce what is not reduced yet; per trainable group and parameter: has any rank a gradient? Collective."""
        if self.backward_running:
            raise StateError(
                "step() was called while a backward is running or after one failed; call reset_iteration() first"
            )
        self.check_here(what="step()")
        if self.sessions:
            raise StateError("step() inside summon or GatheredParameters: leave the context first")
        if self.wrongly_scaled is not None:
            raise StateError(
                f"a backward came through several models whose loss scales or accumulation counts differ, and the "
                f"gradient of {self.wrongly_scaled!r} was added up with the wrong one: step models that one loss "
                "reaches by one optimizer (shardcore.optimizer(cls, [a, b], ...)), or use stage 1 to 3"
            )
        self.refuse_strays()
        self.rest()
        self.structure.check()
        with private.without_torch_function():
            for group in self.groups:
                if not group.trainable and not group.is_frozen():
                    raise StateError(_thawed(group.slots))
        for group in self.groups:
            group.check_storage()
        self.structure.check()
        if self.window.num_backwards:
            num_in = self.num_micro_batches + bool(self.window.num_backwards_in_micro_batch)
            num_in = num_in if self.window.last_backward is not None else self.window.num_backwards
            self._correction = self.accumulation / num_in if 0 < num_in < self.accumulation else 1.0
            self._program.end_step()
        return self.window.finish()

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window."""
        if not set_to_none:
            self.check_here("lp_grads", "contiguous_grad_buffer", what="zero_grad(set_to_none=False)")
        self.num_micro_batches = self.window.num_backwards_in_micro_batch = 0
        self.num_passes += 1
        self._correction = 1.0
        self.wrongly_scaled = self.dropped_gradient = None
        self.num_tokens.clear()
        if self._takes_turns():
            if self.window.num_backwards or self.window.is_clear:
                comm.settle()  # others may have reductions that this rank has not joined yet, and all drop them
        elif self.window.has_reduced:
            comm.note_choice(self.data_axis, "zero_grad of", "gradients that were reduced")
        self.window.clear(set_to_none)

    def reset_iteration(self) -> None:
        """Return to the state between steps after an exception: gradients are dropped. Collective: every rank calls
        it.

        Raises:
            RankMismatchError: the ranks stopped at different collectives; only a restart helps then.
        """
        self._settle_state()
        self.forward_depth = 0
        self.active.clear()
        comm.check_level(self.data_axis)
        self._forget_holders()
        if self.prefetcher is not None:
            self.prefetcher.reset()
        for group in self.groups:
            group.abandon()
        self.num_micro_batches = 0
        self.wrongly_scaled = self.dropped_gradient = None
        self.num_passes += 1
        self.num_tokens.clear()
        self.watch()
        self.window.num_backwards = self.window.num_backwards_in_micro_batch = 0
        self.window.has_reduced = False
        self._program.end()
        comm.clear_failure()

    def acquire(self, unit: Unit, phase: Phase) -> None:
        """Gather the unit's groups, or wait for them, and hold them. Collective over the shard axis."""
        for group in unit.groups:
            self._acquire_group(unit, group, phase)

    def release(self, unit: Unit) -> None:
        """Let go of the unit's groups; those that nobody else holds may be released."""
        for group in unit.groups:
            self._release_group(unit, group)

    def rest(self) -> None:
        """Release what is kept between forward and backward, unless a forward or backward is running."""
        self._end_interrupted_forward()
        if self.prefetcher is not None and not any(group.holders for group in self.groups):
            self.prefetcher.end()

    def _end_exports(self) -> None:
        """A ``state_dict`` that failed has left copies of the parameters, which age from here on."""
        for group in self.groups:
            if group.exporting:
                group.end_export()

    def _end_interrupted_forward(self) -> None:
        """A Ctrl-C, as every exception that is no ``Exception``, leaves a forward without its hooks; if one did, let go
        of what that forward held.
        """
        if self._call is not None and not is_running(self._call):
            self.forward_depth = 0
            self.end_forward(failed=True)

    def _acquire_group(self, unit: Unit, group: ShardGroup, phase: Phase) -> None:
        if self.offloaded:
            self.check_here("lp_params", what=f"the forward of unit {unit.name}")
        if self.prefetcher is not None and unit not in group.holders:
            self.prefetcher.enter(group, phase)
            group.holders[unit] = phase
        group.unshard(exact=False)

    def _release_group(self, unit: Unit, group: ShardGroup) -> None:
        phase = group.holders.pop(unit, None)
        if self.prefetcher is not None and phase is not None:
            self.prefetcher.leave(group, phase)
            if not group.holders:
                group.guard()

    def _release_all_units(self) -> None:
        for group in self.groups:
            for unit in list(group.holders):
                self._release_group(unit, group)

    def _kind_of_forward(self) -> str:
        """Forwards of one kind share a plan: those for evaluation, and the first, second, ... before a backward."""
        if not torch.is_grad_enabled():
            return "eval"
        self._num_forwards = min(self._num_forwards + 1, 8)  # the later ones of a loop without backwards are alike
        return "train" if self._num_forwards == 1 else f"train {self._num_forwards}"

    def _join_groups(self) -> None:
        """Make the groups part of this model, and let ranks on other branches gather and reduce with this one."""
        for group in self.groups:
            group.join(self, self._program, self._gather_on_demand)
        for group in (self.groups[i] for i in self.reduce_order):
            if self.policy.shards_params and group.grads is not None and group.grads.can_be_joined:
                self._program.invite_to_reduce(group.shard_axis, group.name, group.full.numel(), group)

    def _takes_turns(self) -> bool:
        return self._program.takes_turns(self.shard_axis)

    def _forget_holders(self) -> None:
        for group in self.groups:
            group.holders.clear()
        if self.prefetcher is not None:
            self.prefetcher.fail()

    def _default_limits(self) -> PrefetchLimits:
        sizes = [sum(g.nbytes for g in unit.groups) for unit in self.units if unit is not self.root_unit]
        return default_limits(sizes, sum(group.nbytes for group in self.root_unit.groups))

    def _gather_on_demand(self, group: ShardGroup) -> bool:
        """A released parameter is used. Inside the model's forward some module uses it that does not hold it:
        gather.
        """
        if not self.forward_depth and not private.in_backward():
            return False
        unit = self.active[-1] if self.active else self.root_unit
        unit.add(group)  # known from now on, so that its backward and the next step gather it in time
        self._acquire_group(unit, group, "backward" if private.in_backward() else "forward")
        return True

    def _forget_errors_of_another_scale(self) -> None:
        """What quantising took from gradients of another loss scale is in another unit."""
        scale = self._loss_scale.scale if self._loss_scale is not None else 1.0
        if scale != self._error_scale:
            self._error_scale = scale
            for group in self.groups:
                if group.grads is not None:
                    group.grads.route.forget_errors()

    def _settle(self) -> None:
        self._settle_state()
        self._release_all_units()
        if self.prefetcher is not None:
            self.prefetcher.end()

    def _settle_state(self) -> None:
        self.backward_running = False
        self._num_forwards = 0
        self.window.reset_running()
        if not self.forward_depth:
            self.active.clear()
        for unit in self.units:
            unit.end_pass()


def _thawed(slots: Sequence[ParameterSlot]) -> str:
    names = [slot.name for slot in slots][:5]
    return (
        f"requires_grad of {len(slots)} parameters ({', '.join(names)}, ...) changed after sharding, so they have no "
        "gradient and optimizer state; set requires_grad before shardcore.shard(model, ...). Parameters that are "
        "trainable there may be frozen and thawed later"
    )
