"""Hooks that make a sharded model act by itself: forward gathers and releases, backward gathers, reduces and releases.

Forward of a unit: gather (or wait for) its groups, start what the plan gathers ahead, compute, release. Backward of a
unit begins when a gradient reaches one of its outputs, and ends when the gradients of its inputs are complete and no
gradient of its parameters is still to come.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcore import _torch_private as private
from shardcore import comm
from shardcore.errors import StateError
from shardcore.protocols import ParameterSlot, ShardedOptimizerMark, find_slot
from shardcore.zero import scaling
from shardcore.zero.calls import current_exception
from shardcore.zero.gradient_hooks import GradientHooks, refuse_double_backward
from shardcore.zero.group import ShardGroup
from shardcore.zero.inputs import Input, with_originals
from shardcore.zero.root import Root, Unit
from shardcore.zero.saved import Watch
from shardcore.zero.trees import Swaps, map_tensors, tensors_in

_roots: weakref.WeakSet[Root] = weakref.WeakSet()
"""All sharded models of this process."""


def install(root: Root) -> None:
    """Put the hooks of ``root`` on its module, units and parameters. ``torch.compile`` leaves them alone."""
    gradient_hooks = {g: GradientHooks(root, g, g.grads) for g in root.groups if g.grads is not None}
    root.gradient_hooks = gradient_hooks
    if root.needs_unit_hooks:
        for unit in root.units:
            hooks = _UnitHooks(root, unit, gradient_hooks)
            unit.module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(hooks.post_forward, always_call=True)
    _watch_optimizers()
    private.before_any_clipping(_refuse_unsharded_clipping)
    private.before_any_norm(_refuse_norm_of_nothing)
    private.after_any_zero_grad(_clear_sharded)
    _roots.add(root)
    scaling.install(root)
    outer = _RootHooks(root)
    root.module.register_forward_pre_hook(outer.pre_forward, prepend=True, with_kwargs=True)
    root.module.register_forward_hook(outer.post_forward, always_call=True)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _refuse_unsharded_optimizer(optimizer))


def _refuse_unsharded_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer over the parameters themselves would train nothing where gradients are not on them; say so."""
    if isinstance(optimizer, ShardedOptimizerMark):
        return
    slots = [slot for group in optimizer.param_groups for slot in map(find_slot, group["params"]) if slot is not None]
    for root in {slot.group.root: None for slot in slots}:
        root.structure.check()
        if root.backward_running:
            raise StateError(
                f"{type(optimizer).__name__} was stepped inside a backward (by a hook of a parameter?), when gradients "
                "are not yet averaged over the ranks, or after a backward that failed: step after backward, and call "
                "shardcore.reset_iteration(model) after one that failed"
            )
    for slot in slots:
        if not (slot.group.grads is None or slot.group.grads.exposed):
            raise StateError(
                f"{type(optimizer).__name__} was stepped, but it holds parameters of a sharded model (such as "
                f"{slot.name!r}), whose gradients it does not see: use optim = "
                f"shardcore.optimizer({type(optimizer).__name__}, "
                "model, ...), or pass it this optimizer, and step the result"
            )


def _refuse_unsharded_clipping(params: Sequence[torch.Tensor]) -> None:
    """torch's own clipping would find no gradients on sharded parameters, and clip nothing; say so."""
    for param in params:
        slot = find_slot(param)
        if slot is not None and not (slot.group.grads is None or slot.group.grads.exposed):
            raise StateError(
                f"torch.nn.utils was asked to clip gradients of a sharded model (such as that of {slot.name!r}, stage "
                f"{slot.group.policy.stage}), which are not on its parameters: use shardcore.optimizer(..., "
                "max_grad_norm=...) or the configuration's gradient_clipping, which clip in step()"
            )


def _refuse_norm_of_nothing() -> None:
    """The norm of no gradients is 0: wrong where the gradients of a sharded model wait for a step."""
    for root in _roots:
        holding = [g for g in root.groups if g.grads is not None and not g.grads.exposed and any(g.grads.present)]
        if holding:
            raise StateError(
                "torch.nn.utils.get_total_norm got no gradients, while a sharded model has some that are not on its "
                "parameters: set max_grad_norm (or track_grad_norm) and read optimizer.grad_norm after step(), or give "
                "it shardcore.zero.full_grad(param) of each parameter (collective)"
            )


def _clear_sharded(module: nn.Module, set_to_none: bool) -> None:
    """``module.zero_grad()`` of a sharded model, a part or a wrapper of one."""
    by_root: dict[Root, list[ParameterSlot]] = {}
    for slot in map(find_slot, module.parameters()):
        if slot is not None and slot.group.trainable:
            by_root.setdefault(slot.group.root, []).append(slot)
    for root, slots in by_root.items():
        root.clear_gradients_of(slots, set_to_none)


def _refuse_ddp(model: nn.Module) -> None:
    """DDP would average gradients a second time; where it keeps them in its own buckets, ours would stay empty."""
    ddp = private.running_ddp()
    if ddp is not None and any(module is model for module in ddp.modules()):
        raise StateError(
            "DistributedDataParallel around a model (or a part of one) that shardcore.shard has sharded: shard reduces "
            "gradients over the data-parallel ranks itself; use the model without DDP (stage 0 is what DDP does)"
        )


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a unit's forward, as its backward needs to know it."""

    inputs: dict[int, Input] = field(default_factory=dict)
    """The inputs that take a gradient, by their identity, until the forward has returned."""
    nodes: list[Node] = field(default_factory=list)
    """What these come from in autograd's graph, as long. Hooks on them lead here, so what stays would be a cycle
    through the graph, which no garbage collector enters."""
    has_inputs: bool = False
    is_blind: bool = False
    """Not every input can tell that its gradient is complete, so the call ends with the backward."""
    swaps: Swaps = field(default_factory=Swaps)
    """Inputs in the caller's containers, which are aliased during the forward."""
    watch: Watch | None = None
    backward: int = -1
    """The backward that the numbers are of."""
    num_expected: int = -1
    """Inputs to which it brings a gradient; -1 before it has come to the call."""
    num_arrived: int = 0

    def leave(self) -> None:
        """The forward has returned, or failed."""
        # What the forward wrote to has another history now.
        given = zip(self.inputs.values(), self.nodes, strict=False)
        self.is_blind |= any(each.alias.grad_fn is not node for each, node in given)
        self.inputs, self.nodes = {}, []
        self.swaps.undo()
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    def expect(self, nodes: Sequence[Node]) -> bool:
        """The running backward has come to the call; whether it must be waited for: gradients of inputs are to come, or
        there is no input that tells.
        """
        self._enter()
        if self.num_expected < 0:
            self.num_expected = sum(map(private.backward_will_execute, nodes))
        return not self.has_inputs or self.is_blind or self.num_arrived < self.num_expected

    def arrive(self) -> bool:
        """The gradient of an input is complete; whether it was the last one."""
        self._enter()
        self.num_arrived += 1
        return self.num_arrived == self.num_expected and not self.is_blind

    def _enter(self) -> None:
        if self.backward != private.backward_id():
            self.backward, self.num_expected, self.num_arrived = private.backward_id(), -1, 0


class _UnitHooks:
    """Forward and backward of one unit."""

    def __init__(self, root: Root, unit: Unit, gradient_hooks: dict[ShardGroup, GradientHooks]) -> None:
        self._root = root
        self._unit = unit
        self._gradient_hooks = gradient_hooks
        self._releases = root.policy.shards_params
        self._aliases = root.policy.shards_states
        self._errors: list[int] = []
        """Of the forwards that run, outermost first: the identity of an exception that was being handled before."""
        if root.shard_axis.size == 1:
            unit.is_watched = False  # nothing is ever released
        for group in unit.groups:
            if group in gradient_hooks and self._releases:
                gradient_hooks[group].on_complete.append(self._end_backward_if_complete)

    @private.not_traced
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the unit, and note which inputs will tell that its backward is over."""
        root, unit = self._root, self._unit
        if not root.forward_depth:
            _refuse_transforms(self._releases)
        unit.was_called = True
        root.acquire(unit, "backward" if private.in_backward() else "forward")
        self._errors.append(id(current_exception()))
        if self._releases:
            root.active.append(unit)
        if not self._aliases or not torch.is_grad_enabled():
            return None
        call = _Call()
        unit.calls.append(call)
        args = map_tensors(lambda t: self._alias(t, call), args, call.swaps)
        if kwargs:
            kwargs = {key: map_tensors(lambda t: self._alias(t, call), v, call.swaps) for key, v in kwargs.items()}
        if self._releases:
            self._watch_call(call)  # before the forward, which may write to the inputs in place
        return args, kwargs

    @private.not_traced
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Release the unit, and wait for a gradient to reach its outputs."""
        root, unit = self._root, self._unit
        before = self._errors.pop() if self._errors else id(None)
        call = unit.calls.pop() if torch.is_grad_enabled() and unit.calls else None
        has_failed = output is None and id(current_exception()) != before
        nodes: list[Node] = []
        given: dict[int, Input] = {}
        if call is not None:
            nodes, given = call.nodes, call.inputs
            call.leave()
        if not has_failed or private.in_backward():  # there, recomputation leaves a forward that has done enough
            for each in given.values():
                each.hand_over(unit.name)
        output = with_originals(output, given.values())
        if has_failed or not self._releases:
            return output
        while root.active and root.active.pop() is not unit:
            pass  # a module inside left by an exception that was caught
        output = map_tensors(self._own_memory, output)
        if call is not None:
            for tensor in tensors_in(output):
                if tensor.requires_grad and not _is_handed_through(tensor, nodes, given):
                    tensor.register_hook(lambda grad, call=call: self._begin_backward(call, nodes))
        if not private.in_backward() and unit is not root.root_unit:
            root.release(unit)
        return output

    def _own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an output that is a view of the unit's parameters, whose memory goes when the unit is released."""
        shown = private.storage_id(tensor) if tensor.layout is torch.strided else 0
        if any(shown == private.storage_id(group.full) for group in self._unit.groups):
            return tensor.clone()
        return tensor

    def _alias(self, tensor: torch.Tensor, call: _Call) -> torch.Tensor:
        """A view of an input, whose gradient is complete when this call's backward is over, whoever else uses the
        input. At stages that release nothing it is there for its order of adding up, which is then that of stage 3.
        """
        if not tensor.requires_grad or (tensor.is_leaf and not self._releases):
            return tensor
        if tensor.layout is not torch.strided or (tensor.is_nested and type(tensor) is torch.Tensor):
            call.has_inputs = call.is_blind = True  # they have no views
            return tensor
        if id(tensor) not in call.inputs:
            call.inputs[id(tensor)] = Input.of(tensor)
        return call.inputs[id(tensor)].alias

    def _watch_call(self, call: _Call) -> None:
        """Wait for the gradients of the inputs, and where need be for reads of what the forward is about to save."""
        inputs = call.inputs.values()
        call.has_inputs |= bool(inputs)
        call.nodes = nodes = [get_gradient_edge(each.alias).node for each in inputs]
        for each in inputs:
            each.end = each.alias.register_hook(lambda grad: self._end_input(call))
        if self._unit.is_watched:
            call.watch = Watch(self._unit, lambda: self._begin_backward(call, nodes))
            call.watch.start()

    @private.not_traced
    def _begin_backward(self, call: _Call, nodes: Sequence[Node]) -> None:
        refuse_double_backward()
        self._root.begin_backward()
        if call.expect(nodes):
            self._unit.open_calls.add(call)
        self._root.acquire(self._unit, "backward")

    @private.not_traced
    def _end_input(self, call: _Call) -> None:
        if call.arrive():
            self._unit.open_calls.discard(call)
            self._end_backward_if_complete()

    def _end_backward_if_complete(self) -> None:
        """Release the unit once nothing in the running backward can need its parameters again.

        Calls without differentiable inputs end with their parameters: every path of their graph leads to one of these.
        """
        if any(call.has_inputs for call in self._unit.open_calls) or self._unit is self._root.root_unit:
            return
        hooks = [self._gradient_hooks[group] for group in self._unit.groups if group in self._gradient_hooks]
        if not all(hook.is_complete() for hook in hooks):
            return
        if not hooks and self._unit.open_calls:
            return  # frozen, and no input tells: kept until backward ends
        self._unit.open_calls.clear()
        for group in self._unit.groups:
            if group in self._gradient_hooks:
                self._root.window.mark_ready(group)
        self._root.release(self._unit)


def _is_handed_through(tensor: torch.Tensor, nodes: Sequence[Node], given: dict[int, Input]) -> bool:
    """Whether an output is an input as it came, itself or the alias of it, and so needs nothing of the unit in
    backward.
    """
    if id(tensor) in given:
        return not given[id(tensor)].was_written_to
    return any(tensor.grad_fn is node for node in nodes)


def _refuse_transforms(releases: bool) -> None:
    """Gradients taken by ``torch.func`` go past the hooks, and gathers cannot be part of a transformed computation."""
    around = private.transforms_around()
    if "Grad" in around or (around and releases):
        raise StateError(
            f"a sharded model was called under torch.func's {', '.join(around)}: gradients there would go past the "
            "reduction over ranks, and released parameters cannot be gathered. Transform an unsharded copy "
            "(torch.func.functional_call(copy, parameters, ...) with parameters from shardcore.state_dict(model)), or "
            "use loss.backward()"
        )


@dataclass(slots=True)
class _Forward:
    """A forward of the whole model that runs."""

    error: int
    """The identity of an exception that was being handled before."""
    swaps: Swaps = field(default_factory=Swaps)
    """Inputs in the caller's containers, which are cast meanwhile."""
    given: set[int] = field(default_factory=set)
    """The identities of the inputs, as the model got them."""


class _RootHooks:
    """Forward of the whole model: casts inputs, notices a backward at the outputs, tells other ranks of an
    exception.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._forwards: list[_Forward] = []
        """Those that run, outermost first."""

    @private.not_traced
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start a forward; floating inputs are cast where the precision casts parameters."""
        _refuse_transforms(self._root.policy.shards_params)
        _refuse_ddp(module)
        self._root.begin_forward()
        while len(self._forwards) >= self._root.forward_depth:  # one that was left without its hooks
            self._forwards.pop().swaps.undo()
        forward = _Forward(id(current_exception()))
        self._forwards.append(forward)
        dtype = self._root.precision.param_dtype

        def give(tensor: torch.Tensor) -> torch.Tensor:
            given = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
            forward.given.add(id(given))
            return given

        args = map_tensors(give, args, forward.swaps)
        return args, {key: map_tensors(give, value, forward.swaps) for key, value in kwargs.items()}

    @private.not_traced
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """End a forward; its outputs tell that a backward has come to the model."""
        forward = self._forwards.pop() if self._forwards else _Forward(id(None))
        forward.swaps.undo()
        error = current_exception()
        if error is not None and output is None and id(error) != forward.error:
            if not private.in_backward():  # there, recomputation leaves a forward by an exception that is caught
                comm.report_failure(error)
            self._root.end_forward(failed=True)
            return None
        if torch.is_grad_enabled() and self._root.forward_depth == 1:
            for tensor in tensors_in(output):
                self._note_output(tensor, forward.given)
        self._root.end_forward()
        return output

    def _note_output(self, tensor: torch.Tensor, given: set[int]) -> None:
        """Let an output tell that a backward has come to the model. One through an input that is handed on need not."""
        if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in given:
            scaling.mark_output(tensor, self._root)
            tensor.register_hook(self._on_gradient)

    @private.not_traced
    def _on_gradient(self, grad: torch.Tensor) -> None:
        if not self._root.backward_running:
            self._root.refuse_strays()
        self._root.begin_backward()
