"""From what a user passes to an optimizer to parameter groups over sharded parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from shardcore.config import nearest
from shardcore.errors import ConfigError
from shardcore.protocols import ShardedRoot, find_pipeline, find_root, find_slot, not_sharded

Options = dict[str, Any]


def resolve_targets(targets: Any) -> tuple[list[ShardedRoot], list[Options]]:
    """(roots, parameter groups) for module(s), parameters or groups of parameters; groups and their options are kept.

    Raises:
        ConfigError: no parameters, none trainable, or some that belong to no sharded module (all counted, some named).
    """
    groups = _as_groups(targets)
    params = [param for group in groups for param in group["params"]]
    if not params:
        raise ConfigError(
            "the optimizer got no parameters: every group is empty. Pass a sharded model or its parameters"
        )
    slots = [find_slot(param) for param in params]
    if None in slots:
        raise ConfigError(_of_strangers(params))
    if len(set(params)) != len(params):
        twice = [slot.name for slot, count in Counter(slots).items() if slot is not None and count > 1]
        raise ConfigError(
            f"{len(twice)} parameters are in the optimizer more than once ({_some(twice)}); list each once"
        )
    roots = list(dict.fromkeys(_slot_root(param) for param in params))
    in_pipeline = any(find_pipeline(root.module) for root in roots)  # other stages have parameters to train
    may_be_thawed = any(slot.group.trainable for slot in slots if slot is not None)  # frozen for a while, as in a GAN
    if not may_be_thawed and not in_pipeline:
        raise ConfigError(
            f"none of the {len(params)} parameters is trainable (requires_grad was False for all when the model was "
            "sharded); nothing can be trained"
        )
    return roots, groups


def named_options(instance: torch.optim.Optimizer, targets: Any) -> list[Options]:
    """The instance's groups, checked to lie within ``targets`` where these are modules."""
    modules = [targets] if isinstance(targets, nn.Module) else [t for t in targets or () if isinstance(t, nn.Module)]
    known = {param for module in modules for param in module.parameters()}
    held = [param for group in instance.param_groups for param in group["params"]]
    unknown = [param for param in held if param not in known]
    if modules and unknown:
        raise ConfigError(
            f"the optimizer holds {len(unknown)} of {len(held)} parameters that are not in the model; build it over "
            "model.parameters()"
        )
    return [dict(group) for group in instance.param_groups]


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` called ``name``, in any case."""
    classes = {key.lower(): cls for key, cls in _classes().items()}
    if name.lower() not in classes:
        near = get_close_matches(name.lower(), classes, n=3)
        raise ConfigError(
            f"unknown optimizer {name!r}; "
            f"{'did you mean ' + ' or '.join(near) + '?' if near else 'known: ' + ', '.join(sorted(classes))}"
        )
    return classes[name.lower()]


def check_options(build: Callable[..., torch.optim.Optimizer], options: Iterable[str]) -> None:
    """Refuse options that the optimizer does not have.

    Raises:
        ConfigError: names each of them, and the nearest that there is.
    """
    try:
        taken = list(inspect.signature(build).parameters.values())[1:]  # after the parameters
    except (TypeError, ValueError):  # written in C, say: it judges for itself
        return
    if any(argument.kind is argument.VAR_KEYWORD for argument in taken):
        return
    known = [argument.name for argument in taken if argument.kind is not argument.POSITIONAL_ONLY]
    problems = []
    for option in options:
        if option not in known:
            guess = nearest(option, known)
            hint = f"did you mean {guess!r}?" if guess is not None else f"it has {', '.join(known) or 'none'}"
            problems.append(f"no option {option!r}; {hint}")
    if problems:
        raise ConfigError(f"optimizer {getattr(build, '__name__', build)}: {'; '.join(problems)}")


def optimizer_names() -> list[str]:
    """The names that :func:`find_class` finds, in any case."""
    return sorted(_classes())


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    }


def _as_groups(targets: Any) -> list[Options]:
    if isinstance(targets, nn.Module):
        targets = [targets]
    items: Sequence[Any] = list(targets) if isinstance(targets, Iterable) else [targets]
    if items and all(isinstance(item, nn.Module) for item in items):
        for module in items:
            if find_root(module) is None:
                raise ConfigError(f"optimizer: {not_sharded(module)}")
        return [{"params": list(dict.fromkeys(p for module in items for p in module.parameters()))}]
    if items and all(isinstance(item, dict) for item in items):
        return [{**item, "params": _as_parameters(item.get("params"))} for item in items]
    return [{"params": _as_parameters(items)}]


def _as_parameters(params: Any) -> list[nn.Parameter]:
    if isinstance(params, torch.Tensor):
        return [params]  # type: ignore[list-item]
    listed = [param[1] if isinstance(param, tuple) else param for param in (params or ())]
    wrong = [type(param).__name__ for param in listed if not isinstance(param, torch.Tensor)]
    if wrong:
        raise ConfigError(f"expected modules, parameters, or dicts with 'params'; got {', '.join(sorted(set(wrong)))}")
    return listed


def _of_strangers(params: Sequence[nn.Parameter]) -> str:
    """What to say of parameters without a place in a sharded model, and where they belong."""
    slots = {param: find_slot(param) for param in params}
    models = dict.fromkeys(slot.group.root.module for slot in slots.values() if slot is not None)
    inside = {param: name for model in models for name, param in model.named_parameters()}
    strangers = [param for param in params if slots[param] is None]
    added = [inside[param] for param in strangers if param in inside]
    if added:
        return (
            f"{len(added)} of the optimizer's {len(params)} parameters ({_some(added)}) were put into the model after "
            "shardcore.shard(model, ...) and cannot be sharded later. Build the whole model first, then shard it, then "
            "make the optimizer"
        )
    shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:5])
    return (
        f"the optimizer holds {len(strangers)} of {len(params)} parameters that are not in a sharded module "
        f"(shapes {shapes}{', ...' if len(strangers) > 5 else ''}). Pass the parameters of a model that "
        "shardcore.shard(model, ...) was called with, taken from that very model"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _slot_root(param: nn.Parameter) -> ShardedRoot:
    slot = find_slot(param)
    if slot is None:
        raise ConfigError("parameter without a sharded module")
    root: ShardedRoot = slot.group.root
    return root
