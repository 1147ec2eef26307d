"""From an ordinary model to the stages of this rank, as the configuration file asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardcore.config import Config
from shardcore.errors import ConfigError
from shardcore.mesh import Mesh
from shardcore.pipeline import Pipeline


def into_stages(config: Config, model: nn.Module, mesh: Mesh, num_microbatches: int) -> Pipeline:
    """A pipeline of the model over the mesh's ``pp`` axis. Collective over all ranks.

    The model itself keeps its modules; parameters of other ranks' stages are replaced by some on the meta device, so
    that this rank's memory holds its own stages only.

    Raises:
        ConfigError: a model that cannot be cut.
        PlanError: fewer layers than stages, or an unknown schedule.
    """
    asked = config.pipeline
    pipe = Pipeline(
        model,
        mesh,
        schedule=asked.schedule,
        num_chunks=asked.num_chunks,
        num_microbatches=num_microbatches,
        partition=asked.effective_partition,
    )
    own = set(pipe.parameters())
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in own:
                away = torch.empty_like(param, device="meta")
                module._parameters[name] = nn.Parameter(away, requires_grad=param.requires_grad)
    return pipe


def listed(parameters: Iterable[Any] | None) -> list[Any] | None:
    """Parameters, (name, parameter) pairs or groups of such, with lists in place of iterators."""
    if parameters is None:
        return None
    return [
        item
        if not isinstance(item, dict) or isinstance(item.get("params", ()), torch.Tensor)
        else {**item, "params": list(item.get("params", ()))}
        for item in parameters
    ]


def _check_parameters(whole: set[nn.Parameter], parameters: list[Any] | None) -> None:
    """Raise unless what is to be trained is in the model."""
    params: list[torch.Tensor] = []
    for item in parameters or ():
        inside = item["params"] if isinstance(item, dict) else [item]
        found = map(_param_of, [inside] if isinstance(inside, torch.Tensor) else inside)
        params += [param for param in found if isinstance(param, torch.Tensor)]
    strangers = [param for param in params if param not in whole]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:5])
        raise ConfigError(
            f"initialize(model_parameters=...): {len(strangers)} of {len(params)} parameters (shapes {shapes}"
            f"{', ...' if len(strangers) > 5 else ''}) are not those of model=: pass "
            "model.parameters() of the same model, taken after the last change to it, or leave model_parameters out"
        )


def on_this_rank(
    model: nn.Module, whole: set[nn.Parameter], parameters: list[Any] | None, optimizer: Any
) -> list[Any] | None:
    """The user's parameters, or groups of them, without those of other ranks' stages; also those of a torch optimizer,
    in place.

    Groups stay, also empty ones, so that a scheduler finds them on every rank; so does what a torch optimizer holds
    that was never in the model, which is refused when it is sharded.

    Args:
        model: this rank's stages, or all of the model.
        whole: the parameters of all of it.
        parameters: what :func:`listed` gave; without use where there is a torch optimizer.

    Raises:
        ConfigError: some of them are not the model's.
    """
    away = whole.difference(model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            _leave_out(group, away)
    else:
        _check_parameters(whole, parameters)
    if parameters is None:
        return None
    kept = [item for item in parameters if isinstance(item, dict) or _param_of(item) not in away]
    return [_leave_out(dict(item), away) if isinstance(item, dict) else item for item in kept]


def _leave_out(group: dict[str, Any], away: set[nn.Parameter]) -> dict[str, Any]:
    """The group without what is in ``away``; its names, where it has some, go along."""
    listed = group["params"]
    params = [listed] if isinstance(listed, torch.Tensor) else list(listed)
    names: Iterable[Any] = group.get("param_names") or [None] * len(params)
    left = [(param, name) for param, name in zip(params, names, strict=True) if _param_of(param) not in away]
    group["params"] = [param for param, _ in left]
    if "param_names" in group:
        group["param_names"] = [name for _, name in left]
    return group


def _param_of(item: Any) -> Any:
    """The parameter of a (name, parameter) pair, or what was listed."""
    return item[1] if isinstance(item, tuple) else item
