"""Every private torch API that shardcore uses, in one place, with the reason and the public way that is missing.

Nothing else in the package may name an underscore attribute of torch; a test in ``tests/house`` says so. When a torch
release changes one of these, this file is the only one to mend.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_c10d import Store as Store
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Run = Callable[[Sequence[torch.Tensor | None]], Any]
BackwardWrapper = Callable[[Sequence[Any], Sequence[torch.Tensor | None], bool, Run], Any]

DispatchMode = TorchDispatchMode
"""Sees every operation that torch dispatches while it is entered."""
flatten, unflatten = tree_flatten, tree_unflatten
"""The leaves of nested containers and how they hang together, and back; torch's tree functions have no public name."""

_clipping_checks: list[Callable[[Sequence[torch.Tensor]], None]] = []
_registered: set[Callable[..., Any]] = set()
"""What has been hung onto torch once, and is not again."""

P = ParamSpec("P")
R = TypeVar("R")


def in_backward() -> bool:
    """True while the autograd engine runs a backward in this thread (also inside recomputation)."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_id() -> int:
    """A number that is the same during one backward and new for the next; -1 outside. Nested backwards differ."""
    return int(torch._C._current_graph_task_id())


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to see the tensor's gradient, or what was added to ``tensor.grad``, and may change it.

    torch has no public way to ask; without it gradients that are computed apart from autograd would miss the hooks.
    """
    after: Any = tensor._post_accumulate_grad_hooks or ()
    return bool(tensor._backward_hooks) or len(after) > isinstance(after, ClosingHooks)


_BEFORE, _EARLIER, _CLOSING = -3, -2, -1


class ClosingHooks(OrderedDict[int, Callable[[torch.Tensor], Any]]):
    """What ``param.register_post_accumulate_grad_hook`` puts on a leaf, in that order, then one hook of our own.

    torch runs hooks in the order in which they came, and has no public way to stay behind those that come later: they
    would find the gradient taken away. ``before`` runs first of all, where there are hooks besides ``closing``.
    """

    def __init__(self, param: torch.Tensor, before: Callable[..., Any], closing: Callable[..., Any]) -> None:
        super().__init__()
        self._before, self._closing = before, closing
        earlier = param._post_accumulate_grad_hooks  # handles lead to this dictionary, so it stays
        param._post_accumulate_grad_hooks = self
        super().__setitem__(_CLOSING, closing)
        if earlier:
            self[_EARLIER] = functools.partial(_run_all, earlier)

    def __setitem__(self, key: int, hook: Callable[[torch.Tensor], Any]) -> None:
        del self[_CLOSING]
        for each, run in ((_BEFORE, self._before), (key, hook), (_CLOSING, self._closing)):
            super().__setitem__(each, run)


def _run_all(hooks: dict[int, Callable[[torch.Tensor], Any]], param: torch.Tensor) -> Any:
    """Their only right answer is None; torch refuses another."""
    return next((answer for hook in tuple(hooks.values()) if (answer := hook(param)) is not None), None)


def hooks_on(tensor: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """What ``register_hook`` has put on the tensor, and will put there until it is written to in place; by the numbers
    of handles. Without it (torch lists none) hooks meant for one tensor would act on a view of it.
    """
    if tensor._backward_hooks is None:
        tensor.register_hook(lambda grad: None).remove()
    found: dict[int, Callable[[torch.Tensor], Any]] = tensor._backward_hooks  # type: ignore[assignment]
    return found


def has_forward_pre_hook(module: torch.nn.Module) -> bool:
    """Whether something sees, and may exchange, what the module is called with.

    torch has no public way to ask; without it modules cannot tell whether they will see the same input.
    """
    return bool(module._forward_pre_hooks)


def transforms_around() -> list[str]:
    """Names of the ``torch.func`` transforms that this code runs under, outermost first: "Grad", "Vmap", "Jvp", ...

    torch has no public way to ask; without it hooks would write to tensors that belong to another level.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return [interpreter.key().name for interpreter in stack]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended. torch has no public hook for that moment."""
    Variable._execution_engine.queue_callback(callback)


def backward_will_execute(node: Node) -> bool:
    """Whether the running backward reaches ``node``: tells an unused parameter from one whose gradient is still to
    come.
    """
    return bool(torch._C._will_engine_execute_node(node))


@contextmanager
def without_torch_function() -> Iterator[None]:
    """Inside, tensor subclasses are plain tensors: ``__torch_function__`` is not called."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


def plain_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call ``func`` with ``__torch_function__`` of subclasses switched off."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def default_store() -> Store:
    """The key-value store behind the default process group: the only channel that works while a collective hangs."""
    return dist.distributed_c10d._get_default_store()


def zero_all(tensors: Sequence[torch.Tensor]) -> None:
    """Set many tensors to zero in one call."""
    torch._foreach_zero_(list(tensors))


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes the tensor for a view, whose history follows writes to its base; torch tells no user."""
    return tensor._is_view()


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place, as autograd counts it."""
    return int(tensor._version)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``, also in a dispatch mode: there a public call would give the alias a count of writes of its
    own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def is_only_user(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shows the storage of this one, and no graph holds it; torch tells neither."""
    return num_storage_users(tensor) == 1 and tensor._use_count() == 1


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Change what :func:`version` says of these tensors, and of all their views."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """The (pack, unpack) hooks that apply to tensors which autograd saves now. The public context manager cannot tell,
    nor be entered in one hook of a module and left in another.
    """
    top: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top


def may_hook_saved_tensors() -> bool:
    """Whether such hooks are allowed here; function transforms forbid them."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Apply these hooks to tensors that are saved from now on."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """End what the last :func:`push_saved_tensor_hooks` began."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def notes_of(node: Node) -> dict[str, Any]:
    """What Python code keeps with a node of the graph (``Node.metadata``, which torch annotates as a method)."""
    notes: dict[str, Any] = node.metadata  # type: ignore[assignment]
    return notes


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called on the module or a part of it."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors show the storage of this one, itself included; torch tells no user of an alias."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less the object that was made just now


def storage_id(tensor: torch.Tensor) -> int:
    """Tells whether tensors show one storage, also where its memory may not be asked for its address."""
    return int(tensor.untyped_storage()._cdata)


def forbid_access(storage: torch.UntypedStorage, message: str) -> None:
    """Let every read and write of this storage's memory, by whatever tensor, raise a RuntimeError with ``message``.
    torch offers no public way; a kernel on a storage without memory crashes.
    """
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def allow_access(storage: torch.UntypedStorage) -> None:
    """Take :func:`forbid_access` back."""
    torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """As :func:`version`, for many, which may be guarded parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._version for tensor in tensors]


def running_ddp() -> torch.nn.Module | None:
    """The ``DistributedDataParallel`` whose forward runs in this process."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of a hook: it breaks the graph there instead of tracing collectives and storages.

    The mark of ``torch.compiler.disable`` stops the compiler at the call, and the strategy of the code keeps it out of
    everything called from there; without importing the compiler (seconds at start) and without a wrapper at each call.
    """
    skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """What ``torch.nn.Module.load_state_dict`` returns; its class has no public name."""
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the module's own buffers that ``state_dict`` leaves out; torch tells them by no public call."""
    return set(module._non_persistent_buffers_set)


def in_process_store() -> Store:
    """A store for a job of one process."""
    return HashStore()


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def new_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """A group of these ranks; None on ranks outside it (torch's annotation names another sentinel). Collective."""
    group = dist.new_group(ranks)
    return group if isinstance(group, dist.ProcessGroup) else None


def share_step_hooks(of: torch.optim.Optimizer, to: torch.optim.Optimizer) -> None:
    """Let hooks around the steps of one optimizer run around those of another, also ones to come."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(to, name, getattr(of, name))


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Make ``step`` the optimizer's own, also in the eyes of a scheduler that was made for it before.

    A scheduler wraps ``step`` to warn if it is stepped first; the replacement carries its mark on (see `mark_stepped`).
    """

    def replaced(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        replaced._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(replaced, optimizer)  # type: ignore[method-assign]  # schedulers want a bound method


@contextmanager
def without_loading_compiler() -> Iterator[None]:
    """Make an optimizer inside without importing ``torch._dynamo``, which takes over a second.

    ``Optimizer.add_param_group`` imports it only to be left alone by it, and remembers the outcome at this attribute.
    Nothing is changed once the compiler is there.
    """
    function = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    if "torch._dynamo" in sys.modules or hasattr(function, "__dynamo_disable"):
        yield
        return
    setattr(function, "__dynamo_disable", function)
    try:
        yield
    finally:
        delattr(function, "__dynamo_disable")


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step with the ``step`` of the optimizer's class, under ``torch.no_grad()``.

    One of torch's own runs without the layers around it: these import ``torch._dynamo`` (over a second) to break a
    graph that is not being compiled. A ``step`` on the instance is passed over: a scheduler that was made for the
    instance of which this one is a copy has put it there, and it would step that instance.
    """
    step = type(optimizer).step
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if is_torchs and not has_hooks and not optimizer.defaults.get("differentiable"):
        step = inspect.unwrap(step)
    step(optimizer)


class ScalerAware:
    """Base of optimizers that want to be asked before ``torch.amp.GradScaler.step`` looks for their gradients.

    The scaler asks each optimizer whether it handles scales itself; there is no other moment to answer it.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        self.check_grad_scaler()
        return False

    def check_grad_scaler(self) -> None:
        """Raise if a scaler cannot work on this optimizer."""


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers of an optimizer that was taken over that it has made a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def before_any_clipping(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Call ``check`` with the parameters before ``torch.nn.utils`` clips their gradients; each function is added once.

    torch's functions see no gradient on sharded parameters and would clip nothing. The norm is taken hold of at the
    helper that ``clip_grad_norm_`` looks up when it runs, so code that imported it earlier is checked too.
    """
    if check in _clipping_checks:
        return
    _clipping_checks.append(check)
    if len(_clipping_checks) > 1:
        return
    norm, value = clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = _checked(norm)
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = _checked(value)


def before_any_norm(check: Callable[[], None]) -> None:
    """Call ``check`` before ``torch.nn.utils.get_total_norm`` takes the norm of no gradients at all.

    That is what it gets from ``[p.grad for p in params if p.grad is not None]`` where gradients are elsewhere. It is
    replaced under its public name only: ``clip_grad_norm_`` checks its parameters itself.
    """
    if check in _registered:
        return
    _registered.add(check)
    norm = torch.nn.utils.get_total_norm

    @functools.wraps(norm)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not tensors:
            check()
        return norm(tensors, *args, **kwargs)

    torch.nn.utils.get_total_norm = checked


def after_any_zero_grad(callback: Callable[[torch.nn.Module, bool], None]) -> None:
    """Call ``callback(module, set_to_none)`` when a module has cleared its gradients, also a part or a wrapper of a
    model. torch's method looks at ``param.grad`` only, and offers no hook.
    """
    if callback in _registered:
        return
    _registered.add(callback)
    zero_grad = torch.nn.Module.zero_grad

    @functools.wraps(zero_grad)
    def both(self: torch.nn.Module, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        callback(self, set_to_none)

    torch.nn.Module.zero_grad = both  # type: ignore[method-assign]


def before_any_parameter(callback: Callable[[torch.Tensor], None]) -> None:
    """Call ``callback(data)`` before ``nn.Parameter(data)``, or the constructor of a subclass, shows the memory of a
    tensor ``data``. torch offers no hook, and looks at the tensor's class first, which is swapped while data are away.
    """
    if callback in _registered:
        return
    _registered.add(callback)

    def seen(make: Callable[..., Any]) -> Any:
        @functools.wraps(make)
        def made(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(data, torch.Tensor):
                callback(data)
            return make(cls, data, *args, **kwargs)

        return staticmethod(made)

    torch.nn.Parameter.__new__ = seen(torch.nn.Parameter.__new__)  # type: ignore[method-assign]
    torch.Tensor._make_subclass = seen(torch.Tensor._make_subclass)  # type: ignore[method-assign]


def around_any_backward(wrapper: BackwardWrapper) -> None:
    """Run every backward of this process, and every ``torch.autograd.grad``, by
    ``wrapper(roots, gradients, accumulates, run)``, which calls ``run(gradients)``.

    ``accumulates`` tells a backward from ``grad``. torch has no public hook for the moment at which gradients enter the
    engine; both functions look this one up when they run, under whatever name they were imported.
    """
    if wrapper in _registered:
        return
    _registered.add(wrapper)
    inner = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @not_traced
    def run_backward(roots: Sequence[Any], gradients: Sequence[torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
        accumulates = bool(kwargs.get("accumulate_grad"))
        return wrapper(roots, gradients, accumulates, lambda given: inner(roots, given, *args, **kwargs))

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined,assignment]


def _checked(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for check in _clipping_checks:
            check(parameters)
        return clip(parameters, *args, **kwargs)

    return checked


@contextmanager
def open_archive(path: Path) -> Iterator[Callable[[str, bytes | torch.Tensor], None]]:
    """A new file in the form of ``torch.save``; gives what writes a record: its name, and bytes or a CPU tensor that
    has its storage to itself. ``torch.save`` itself wants all tensors in memory at once.
    """
    writer = torch._C.PyTorchFileWriter(str(path))

    def put(name: str, content: bytes | torch.Tensor) -> None:
        if isinstance(content, torch.Tensor):
            storage = content.untyped_storage()
            writer.write_record(name, storage, storage.nbytes())  # type: ignore[arg-type]  # as torch.save does it
        else:
            writer.write_record(name, content, len(content))

    try:
        put("byteorder", sys.byteorder.encode())
        yield put
    finally:
        writer.write_end_of_file()


def rebuilt(storage: Any, shape: torch.Size) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a pickle of ``torch.save`` says of a contiguous tensor [shape] of its own storage: a function of torch's
    that has no public name, and its arguments.
    """
    strides = [shape[dim + 1 :].numel() for dim in range(len(shape))]
    return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(shape), tuple(strides), False, OrderedDict())
