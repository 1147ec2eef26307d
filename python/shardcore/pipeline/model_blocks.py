"""A Hugging Face model without a pipeline plan as a chain of layers: what comes before its blocks, each block, and what
comes after them.

The model is run once on two tokens with stand-ins for its blocks. That shows which modules it calls before and which
behind them, and how blocks are called; nothing is read from its code. The links of the chain then run the model's own
forward, up to the first block or from the last one on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardcore.blocks import choose_blocks
from shardcore.errors import ConfigError
from shardcore.pipeline.model_part import ModelPart, move_buffers, replaced

_HIDDEN = "hidden_states"
_OPTIONS: dict[str, Any] = {"use_cache": False, "return_dict": True}
_BEFORE, _BETWEEN, _AFTER = "before", "between", "after"
Wrap = Callable[[torch.Tensor], Any]


class _Reached(Exception):
    """The last block has been called: all that blocks are called with is known."""


class _StandIn(nn.Module):
    """Notes what a block is called with, and passes its input on as the block would its output."""

    def __init__(self, calls: list[tuple[Any, Any]], wrap: Wrap, ends: bool = False) -> None:
        super().__init__()
        self._calls, self._wrap, self._ends = calls, wrap, ends

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states."""
        self._calls.append((args, kwargs))
        if self._ends:
            raise _Reached
        return self._wrap(args[0] if args else kwargs[_HIDDEN])


class _Given(nn.Module):
    """In place of a block: the output of the last one."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self._wrap = wrap
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states that were given."""
        if self.hidden is None:
            raise RuntimeError("no hidden states were given")
        return self._wrap(self.hidden)


class _Blank(nn.Module):
    """In place of a module before the blocks, where what it computes is not used: zeros of the right shape."""

    def __init__(self, shapes: tuple[torch.Size, torch.Size]) -> None:
        super().__init__()
        taken, given = shapes
        self._num_kept = len(given) - 1
        """Dims of the input that the output has, too; an embedding keeps all."""
        self._width = given[-1]
        if taken[: self._num_kept] != given[:-1]:
            raise ConfigError(
                f"Pipeline: a module before the blocks makes {tuple(given)} of {tuple(taken)}, which is neither an "
                "embedding nor a projection; pass a list of layers instead"
            )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Zeros."""
        x = _first_tensor(args, kwargs)
        return torch.zeros(*x.shape[: self._num_kept], self._width, device=x.device)


def parts_of_blocks(model: Any, device: torch.device) -> dict[str, ModelPart]:
    """The links by name.

    Raises:
        ConfigError: the model has no list of blocks or several, does not pass one tensor from block to block, or has
            parameters that belong neither before nor behind the blocks.
    """
    path = _path_of_blocks(model)
    blocks = list(model.get_submodule(path))
    wrap, probe = _probe(model, path, len(blocks))
    phases = probe.phases
    names = {phase: _outermost([name for name in phases if phases[name] == phase]) for phase in (_BEFORE, _AFTER)}
    before, after = ({name: model.get_submodule(name) for name in names[phase]} for phase in (_BEFORE, _AFTER))
    move_buffers(model, [*blocks, *before.values(), *after.values()], device)
    calls: list[tuple[Any, Any]] = []
    stand_ins = [_StandIn(calls, wrap, ends=i == len(blocks) - 1) for i in range(len(blocks))]
    head = replaced(model, {path: nn.ModuleList(stand_ins), **{name: nn.Identity() for name in after}})
    given = _Given(wrap)
    blanks = {name: _Blank(probe.shapes[name]) for name in before}
    tail = replaced(model, {path: nn.ModuleList([given] * len(blocks)), **blanks})
    links = {next(iter(before)): ModelPart(before, _begin(head, calls), head)}
    for i, block in enumerate(blocks):
        links[f"{path}.{i}"] = ModelPart({f"{path}.{i}": block}, _step(block))
    links[next(reversed(after))] = ModelPart(after, _finish(tail, given), tail)
    return links


def _path_of_blocks(model: nn.Module) -> str:
    chosen = choose_blocks(model, "auto")
    paths = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and all(block in chosen for block in module)
    ]
    if len(paths) != 1:
        raise ConfigError(
            f"Pipeline: {type(model).__name__} has {len(paths)} lists of blocks {paths}, expected one; pass a list of "
            "layers instead"
        )
    return str(paths[0])


class _Probe:
    """A run of the model with stand-ins for its blocks, and what its hooks have seen."""

    def __init__(self, model: Any, path: str, num_blocks: int, wrap: Wrap) -> None:
        self.calls: list[tuple[Any, Any]] = []
        """What the blocks were called with."""
        self.phases: dict[str, str] = {}
        """When each module outside them that has parameters was called."""
        self.shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        """Of its first argument and its output."""
        self._name, self._num_blocks = type(model).__name__, num_blocks
        stand_ins = nn.ModuleList(_StandIn(self.calls, wrap) for _ in range(num_blocks))
        self._clone = replaced(model, {path: stand_ins})
        self._device = next(iter(model.parameters())).device

    def run(self) -> None:
        """Forward of two tokens."""
        owners = [(name, module) for name, module in self._clone.named_modules() if _owns_parameters(module)]
        handles = [module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in owners]
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self._clone(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self._device), **_OPTIONS)
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            num_called = len(self.calls)
            phase = _BEFORE if num_called == 0 else _AFTER if num_called == self._num_blocks else _BETWEEN
            if self.phases.setdefault(name, phase) != phase or phase == _BETWEEN:
                raise ConfigError(
                    f"Pipeline: {self._name} calls {name!r} on both sides of its blocks, or between them; pass a list "
                    "of layers instead"
                )
            if isinstance(output, torch.Tensor):
                self.shapes[name] = (_first_tensor(args, kwargs).shape, output.shape)

        return note


def _probe(model: Any, path: str, num_blocks: int) -> tuple[Wrap, _Probe]:
    """How blocks return their output, and what a run shows."""
    failures = []
    for wrap in (_as_it_is, _in_a_tuple):
        probe = _Probe(model, path, num_blocks, wrap)
        try:
            probe.run()
        except ConfigError:
            raise
        except (RuntimeError, TypeError, LookupError, AttributeError, ValueError) as error:  # not what blocks return
            failures.append(f"{type(error).__name__}: {error}")
            continue
        if len(probe.calls) != num_blocks:
            failures.append(f"it called {len(probe.calls)} of {num_blocks} blocks")
        elif not all(_hidden(call) is _hidden(probe.calls[0]) for call in probe.calls):
            failures.append("the input of a block was not the output of the one before")
        else:
            _check_phases(model, path, probe.phases)
            return wrap, probe
    raise ConfigError(
        f"Pipeline: {type(model).__name__} has no pipeline plan, and does not pass one tensor from each block of "
        f"{path!r} to the next ({'; '.join(failures)}); pass a list of layers instead"
    )


def _check_phases(model: nn.Module, path: str, phases: dict[str, str]) -> None:
    unknown = [
        name
        for name, module in model.named_modules()
        if _owns_parameters(module) and not f"{name}.".startswith(f"{path}.") and name not in phases
    ]
    around = [name for name in phases if f"{path}.".startswith(f"{name}." if name else "")]
    if unknown or around:
        raise ConfigError(
            f"Pipeline: {type(model).__name__} has parameters of which its forward does not show where they are used: "
            f"in {', '.join(repr(name) for name in unknown + around)}; pass a list of layers instead"
        )
    for phase in (_BEFORE, _AFTER):
        if phase not in phases.values():
            raise ConfigError(f"Pipeline: {type(model).__name__} has no parameters {phase} its blocks; pass a list")


def _owns_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _hidden(call: tuple[Any, Any]) -> Any:
    args, kwargs = call
    return args[0] if args else kwargs.get(_HIDDEN)


def _first_tensor(args: Any, kwargs: Any) -> torch.Tensor:
    return next(each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor))


def _as_it_is(hidden: torch.Tensor) -> Any:
    return hidden


def _in_a_tuple(hidden: torch.Tensor) -> Any:
    return (hidden,)


def _begin(head: Any, calls: list[tuple[Any, Any]]) -> Callable[[dict[str, Any]], Any]:
    """Everything up to the first block. What later blocks are called with travels along."""

    def act(arguments: dict[str, Any]) -> Any:
        calls.clear()
        with suppress(_Reached):
            head(**arguments, **_OPTIONS)
        rest = [(args[1:], {k: v for k, v in kwargs.items() if k != _HIDDEN}) for args, kwargs in calls]
        value = {"arguments": arguments, "hidden": _hidden(calls[0]), "by_name": not calls[0][0], "calls": rest}
        calls.clear()
        return value

    return act


def _step(block: nn.Module) -> Callable[[dict[str, Any]], Any]:
    def act(value: dict[str, Any]) -> Any:
        (args, kwargs), *rest = value["calls"]
        hidden = value["hidden"]
        output = block(*args, **{_HIDDEN: hidden}, **kwargs) if value["by_name"] else block(hidden, *args, **kwargs)
        return {**value, "hidden": output[0] if isinstance(output, tuple) else output, "calls": rest}

    return act


def _finish(tail: Any, given: _Given) -> Callable[[dict[str, Any]], Any]:
    """Everything from the last block on."""

    def act(value: dict[str, Any]) -> Any:
        given.hidden = value["hidden"]
        try:
            output = tail(**value["arguments"], **_OPTIONS)
        finally:
            given.hidden = None
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    return act
