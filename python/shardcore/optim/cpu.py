"""Optimizers that run on the CPU in the Rust core: one pass over memory for everything that happens to a tensor.

They are torch optimizers: ``param_groups``, ``state`` and ``state_dict`` have torch's names, so schedulers work on
them, and a state moves from ``torch.optim.AdamW`` to `CPUAdamW` and back. What they add:

- 16-bit parameters are trained in full precision, with an fp32 master in the state, or (bf16) with the 16 bits that
  the parameter lacks (``master="split"``), which gives the same masters bit for bit in two thirds of the memory;
- ``state_dtype="bf16"`` keeps the states in half the bytes. What changes by less than the last place of a bf16 in a
  step is rounded stochastically: rounded to nearest it would stop following the gradients;
- all tensors of a step are one call, whose result does not depend on the number of threads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import torch
from torch.autograd.graph import increment_version

from shardcore import _core
from shardcore import _torch_private as private
from shardcore.errors import CheckpointError, ConfigError

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
State = dict[str, Any]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STORAGE_DEFAULTS: dict[str, Any] = {"state_dtype": "fp32", "master": "fp32", "seed": 0}
_FORM = ("state_dtype", "master")
"""Options that belong to an optimizer and not to the state that it loads."""
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")
_OF_PARAMETER = ("step", "master", "remainder")
"""Entries of a state that every rule may have."""


class Storage(TypedDict, total=False):
    """How a CPU optimizer keeps its states. All but ``rounding`` and ``num_threads`` may differ between groups."""

    state_dtype: str
    """``"fp32"``, or ``"bf16"`` for states in half the bytes."""
    rounding: str
    """How bf16 states are rounded: ``"stochastic"``. ``"nearest"`` is refused, with the reason."""
    master: str
    """Of 16-bit parameters: ``"fp32"``, or ``"split"`` (bf16 only) for the 16 bits that the parameter lacks."""
    seed: int
    """Of stochastic rounding. Equal seeds give equal trainings, also after a state was saved and loaded."""
    num_threads: int | None
    """At most so many threads in a step; None for as many as torch uses."""


@dataclass(slots=True)
class Entry:
    """A parameter that is stepped now."""

    number: int
    """Its place among all parameters of the optimizer: the key of stochastic rounding."""
    group: int
    param: torch.Tensor
    grad: torch.Tensor
    state: State


class CPUOptimizer(torch.optim.Optimizer):
    """What the five rules share: where states live, and the step."""

    states: ClassVar[tuple[str, ...]]
    """Names of the states of an element, as torch calls them."""

    def __init__(self, params: Params, options: dict[str, Any], storage: Storage) -> None:
        name = type(self).__name__
        unknown = sorted(set(storage) - set(Storage.__annotations__))
        if unknown:
            raise TypeError(f"{name}() got unexpected options {', '.join(unknown)}")
        if storage.get("rounding", "stochastic") != "stochastic":
            raise ConfigError(
                f"{name}: rounding={storage['rounding']!r}: expected 'stochastic'. A second moment that is rounded to "
                "the nearest bf16 stops following the gradients, since a step changes it by less than its last place"
            )
        self.num_threads = storage.get("num_threads")
        """At most so many threads in a step; None for as many as torch uses."""
        self.grad_norm: float | None = None
        """The norm of the last step's gradients, after unscaling and before clipping; None if it was not asked for."""
        self._forget_caches()
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        kept = {key: value for key, value in storage.items() if key in _STORAGE_DEFAULTS}
        super().__init__(params, {**options, **_STORAGE_DEFAULTS, **kept})

    @abstractmethod
    def rule(self, group: Mapping[str, Any]) -> _core.CPURule:
        """The update rule of a group, from its present options.

        Raises:
            ConfigError: an option is out of range or not supported.
        """

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the states that the group's rule keeps."""
        return self.states

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grads: Mapping[torch.Tensor, torch.Tensor] | None = None,
        grad_scale: float = 1.0,
        max_grad_norm: float | None = None,
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
            grads: gradients to use in place of ``param.grad``, in fp32, bf16 or fp16; parameters not in it stay as they
                are.
            grad_scale: gradients are multiplied by this first: the inverse of the loss scale.
            max_grad_norm: clip the global norm of the scaled gradients to this, as ``torch.nn.utils.clip_grad_norm_``
                does; the gradients themselves are left as they are.

        Raises:
            ConfigError: a tensor that a CPU kernel cannot work on: sparse, not on the CPU, of another length.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = self._entries(grads)
        if not entries:
            return loss
        self._take_over_changed(entries)
        table = self._table_for(entries)
        gradients = [entry.grad for entry in entries]
        num_threads = self.num_threads or torch.get_num_threads()
        if max_grad_norm is not None:
            self.grad_norm = cpu_norm(gradients, num_threads=num_threads) * abs(grad_scale)
            # torch clips with this much room, and lets a non-finite norm through.
            factor = max_grad_norm / (self.grad_norm + 1e-6)
            grad_scale *= factor if math.isnan(factor) else min(1.0, factor)
        for param, staged in self._staged:
            staged.copy_(param)
        table.step(
            gradients,
            [self.rule(group) for group in self.param_groups],
            grad_scale=grad_scale,
            num_threads=num_threads,
            seeds=[group["seed"] for group in self.param_groups],
        )
        self._after_step([entry.param for entry in entries])
        return loss

    def copy_to(self, param: torch.Tensor, target: torch.Tensor | None) -> None:
        """Write a bf16 or fp16 copy of an fp32 parameter to ``target`` in each step, in the same pass; None ends it.

        Raises:
            ConfigError: the parameter is not fp32 or not contiguous, or the target has another shape or type.
        """
        if target is None:
            self._copies.pop(param, None)
        elif param.dtype != torch.float32 or not param.is_contiguous():
            raise ConfigError("copy_to: expected a contiguous fp32 parameter; a 16-bit one is its own copy")
        elif target.dtype not in (torch.bfloat16, torch.float16) or target.shape != param.shape:
            raise ConfigError(
                f"copy_to: expected a bf16 or fp16 target of shape {tuple(param.shape)}, got {target.dtype} of shape "
                f"{tuple(target.shape)}"
            )
        else:
            self._copies[param] = target
        self._forget_caches()

    def complete_states(self, allocate: Callable[[str, int, torch.dtype], torch.Tensor | None]) -> None:
        """Make the states of fp32 parameters that have none, before their first step, in memory of the caller's choice.

        Args:
            allocate: gives zeros [numel] for (name of the state, numel, dtype); where it gives None, as a caller that
                only counts does, the state is not made yet.
        """
        for group in self.param_groups:
            dtype = _DTYPES[group["state_dtype"]]
            for param in (param for param in group["params"] if not self.state[param]):
                made = {name: allocate(name, param.numel(), dtype) for name in self.states_of(group)}
                found = {name: memory.view(param.shape) for name, memory in made.items() if memory is not None}
                if len(found) == len(made):
                    for name, memory in found.items():
                        memory.copy_(self._fresh(param, group, name))
                    self.state[param] = {"step": torch.tensor(0.0), **found}
        self._forget_caches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ConfigError: an option is out of range, or a parameter cannot be trained on the CPU.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._forget_caches()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this optimizer, or of torch's of the same rule.

        States are brought into the form that this optimizer keeps: fp32 or bf16, with or without a master. Where the
        state has no master, the parameter as it is now becomes it.

        Raises:
            CheckpointError: the state is that of another rule.
            ConfigError: it was made with an option that is not supported (amsgrad).
        """
        for group in state_dict["param_groups"]:
            self._refuse_unsupported(group)
        forms = [{key: group[key] for key in _FORM} for group in self.param_groups]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        # The base class would cast everything to the parameter's type, masters of bf16 parameters included.
        super().load_state_dict({**state_dict, "state": {}})
        params = []
        for group, form in zip(self.param_groups, forms, strict=True):
            group.update(form)
            params += [(param, group) for param in group["params"]]
        for number, (param, group) in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = self._adopted(param, group, state_dict["state"][number])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in {**_STORAGE_DEFAULTS, **self.defaults}.items():
                group.setdefault(key, value)
        self.__dict__.setdefault("num_threads", None)
        self.__dict__.setdefault("grad_norm", None)
        self.__dict__.setdefault("_copies", {})
        self._forget_caches()

    # ------------------------------------------------------------------------------------------------------ internals

    def _forget_caches(self) -> None:
        self._table: _core.CPUStepTable | None = None
        self._table_key: list[int] = []
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: dict[torch.Tensor, int] = {}

    def _refuse_unsupported(self, group: Mapping[str, Any]) -> None:
        for key in _UNSUPPORTED:
            if group.get(key):
                raise ConfigError(
                    f"{type(self).__name__}: {key}=True is not supported by the CPU kernels; leave it out, or use "
                    "torch.optim"
                )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        self._refuse_unsupported(group)
        name = type(self).__name__
        for key, known in (("state_dtype", ("fp32", "bf16")), ("master", ("fp32", "split"))):
            if group[key] not in known:
                raise ConfigError(f"{name}: {key}={group[key]!r}: expected {' or '.join(map(repr, known))}")
        self.rule(group)
        for param in group["params"]:
            _check_param(name, param, group)

    def _entries(self, grads: Mapping[torch.Tensor, torch.Tensor] | None) -> list[Entry]:
        """What has a gradient; states are made where missing."""
        entries = []
        number = 0
        for index, group in enumerate(self.param_groups):
            num_entries = 1 + len(self.states_of(group))
            for param in group["params"]:
                grad = param.grad if grads is None else grads.get(param)
                if grad is not None:
                    state = self.state[param]
                    if len(state) < num_entries + (param.dtype != torch.float32):
                        self._complete(param, state, group)
                    entries.append(Entry(number, index, param, grad, state))
                number += 1
        return entries

    def _complete(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> None:
        """Add what a parameter's state lacks."""
        if "step" not in state:
            # torch's SGD does not count its steps; where it has left a momentum, there was at least one.
            state["step"] = torch.tensor(1.0 if state else 0.0)
        for name in self.states_of(group):
            if name not in state:
                state[name] = self._fresh(param, group, name)
        if param.dtype != torch.float32:
            split = group["master"] == "split"
            if split and "remainder" not in state:
                state["remainder"] = torch.zeros(param.shape, dtype=torch.int16)
            elif not split and "master" not in state:
                state["master"] = param.detach().to(torch.float32, memory_format=torch.contiguous_format)

    def _fresh(self, param: torch.Tensor, group: Mapping[str, Any], name: str) -> torch.Tensor:
        return torch.zeros(param.shape, dtype=_DTYPES[group["state_dtype"]])

    def _adopted(self, param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]) -> State:
        """A saved state in the form that this optimizer keeps."""
        names = self.states_of(group)
        found = [name for name, value in saved.items() if name not in _OF_PARAMETER and value is not None]
        if found and set(found) != set(names):
            raise CheckpointError(
                f"{type(self).__name__}: the state of a parameter has {', '.join(found)}; expected "
                f"{', '.join(names) or 'none'}. It is that of another optimizer"
            )
        dtypes = dict.fromkeys(found, _DTYPES[group["state_dtype"]])
        if param.dtype != torch.float32:
            key = "remainder" if group["master"] == "split" else "master"
            dtypes |= {key: torch.int16 if key == "remainder" else torch.float32}
        kept: State = {}
        if "step" in saved:
            kept["step"] = torch.as_tensor(saved["step"], dtype=torch.float32).detach().to("cpu", copy=True)
        for name, dtype in dtypes.items():
            if name in saved:
                if saved[name].shape != param.shape:
                    raise CheckpointError(
                        f"{type(self).__name__}: {name} has shape {tuple(saved[name].shape)}, its parameter "
                        f"{tuple(param.shape)}; load the state of the same model"
                    )
                kept[name] = saved[name].detach().to("cpu", dtype, copy=True).contiguous()
        self._complete(param, kept, group)
        return kept

    def _table_for(self, entries: list[Entry]) -> _core.CPUStepTable:
        """The table of these tensors: the last one, if they are the same."""
        key = [len(self.states_of(group)) for group in self.param_groups]
        key += [id(value) for entry in entries for value in (entry.param, *entry.state.values())]
        if self._table is None or key != self._table_key:
            self._staged = []
            self._table = _core.CPUStepTable([self._row(entry) for entry in entries])
            self._table_key = key
        return self._table

    def _row(self, entry: Entry) -> tuple[Any, ...]:
        param, state, group = entry.param, entry.state, self.param_groups[entry.group]
        first, second, *_ = (*(state[name] for name in self.states_of(group)), None, None)
        target = param
        if not param.is_contiguous():
            target = torch.empty(param.shape, dtype=param.dtype)
            self._staged.append((param, target))
        if param.dtype == torch.float32:
            values, low, copy = target, None, self._copies.get(param)
        elif group["master"] == "split":
            values, low, copy = target, state["remainder"], None
        else:
            values, low, copy = state["master"], None, target
        return entry.number, entry.group, state["step"], values, low, first, second, copy

    def _take_over_changed(self, entries: list[Entry]) -> None:
        """A 16-bit parameter that was set since the last step (weights loaded, say) is the new value of its master."""
        for entry in entries:
            param, master = entry.param, entry.state.get("master")
            if master is not None and self._versions.get(param) != private.version(param):
                changed = master.to(param.dtype) != param
                master[changed] = param[changed].float()

    def _after_step(self, params: list[torch.Tensor]) -> None:
        for param, staged in self._staged:
            param.copy_(staged)
        # The kernels write behind torch's back; autograd must know that what it saved for a backward is gone.
        increment_version(params)
        for param in params:
            if param.dtype != torch.float32:
                self._versions[param] = private.version(param)


def cpu_norm(tensors: Sequence[torch.Tensor], *, num_threads: int | None = None) -> float:
    """The norm of all elements of CPU tensors in fp32, bf16 or fp16, summed in fp64.

    The same bits for every number of threads. It is inf or NaN where an element is.
    """
    sums = _core.sums_of_squares(list(tensors), num_threads=num_threads or torch.get_num_threads())
    return float(sum(sums) ** 0.5)


def _check_param(optimizer: str, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    if param.device.type != "cpu":
        raise ConfigError(
            f"{optimizer}: a parameter of shape {tuple(param.shape)} is on {param.device}; expected the CPU"
        )
    if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{optimizer}: a parameter of shape {tuple(param.shape)} is {param.dtype}; expected float32, bfloat16 or "
            "float16. Use torch.optim for other types"
        )
    if group["master"] == "split" and param.dtype == torch.float16:
        raise ConfigError(
            f"{optimizer}: master='split' splits an fp32 into a bf16 and the rest, and a parameter of shape "
            f"{tuple(param.shape)} is float16; give its group master='fp32'"
        )
