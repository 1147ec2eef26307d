"""Whether an optimizer treats elements one by one, which running it on pieces of parameters requires."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any, TypeGuard

import torch

from shardcore import _torch_private as private
from shardcore.errors import ConfigError


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Try the optimizer, by the options of each of its groups, on a small matrix, on its elements as a vector, on this
    cut in two, and on each of the two parts alone; the results must agree.

    Raises:
        ConfigError: they differ (LAMB, LARS, Adafactor: norms over whole layers; Prodigy, or clipping inside: norms
            over all parameters; weight decay on matrices alone), or the optimizer needs matrices (Muon), a closure
            (LBFGS) or a graph of its steps (``differentiable``).
    """
    tried: list[dict[str, Any]] = []
    for group in range(len(optimizer.param_groups)):
        options = _options(optimizer, group)
        if options not in tried:
            tried.append(options)
            _check_group(optimizer, group)


def _check_group(optimizer: torch.optim.Optimizer, group: int) -> None:
    name = type(optimizer).__name__
    if optimizer.param_groups[group].get("differentiable"):
        raise ConfigError(
            f"optimizer {name}(differentiable=True): steps of a sharded optimizer are not recorded; leave it out"
        )
    torch_state = torch.get_rng_state()
    try:
        whole = _run(optimizer, group, [8])
        cut = _run(optimizer, group, [3, 5])
        matrix = _run(optimizer, group, [8], (2, 4))
        apart = _run_apart(optimizer, group, [3, 5])
    except Exception as error:  # whatever a foreign optimizer raises when given vectors means the same to the user
        raise ConfigError(
            f"optimizer {name} cannot run on pieces of parameters, which sharding needs ({type(error).__name__}: "
            f"{error}). Use an "
            "element-wise optimizer (SGD, Adam, AdamW, Lion, Adagrad, RMSprop, ...)"
        ) from error
    finally:
        torch.set_rng_state(torch_state)
    if not torch.allclose(whole, cut, rtol=1e-5, atol=1e-7):
        raise ConfigError(
            f"optimizer {name} is not element-wise: cutting a parameter in two changes its update, so sharding would "
            "train another model. Use an element-wise optimizer (SGD, Adam, AdamW, Lion, Adagrad, RMSprop, ...)"
        )
    if not torch.allclose(whole, apart, rtol=1e-5, atol=1e-7):
        raise ConfigError(
            f"optimizer {name} is not element-wise: what it does to a parameter depends on the others (a norm over all "
            "of them?), of which each rank has only a part. Use an element-wise optimizer (SGD, Adam, AdamW, "
            "Lion, Adagrad, RMSprop, ...); clip by shardcore.optimizer(..., max_grad_norm=...)"
        )
    if not torch.allclose(whole, matrix, rtol=1e-5, atol=1e-7):
        raise ConfigError(
            f"optimizer {name} treats a matrix and its elements as a vector differently (a look at param.ndim?), but "
            "sharded parameters reach it as vectors. Put what depends on the shape into parameter groups, such as one "
            "with weight_decay=0 for biases and norms"
        )


def states_of(optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states that the optimizer keeps for each element of a parameter of ``dtype`` in its ``group``-th group."""
    return {name: value.dtype for name, value in _state_of(optimizer, group, dtype).items() if _is_per_element(value)}


def values_of(optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype) -> dict[str, object]:
    """The states that are one value for all elements of a parameter, as the optimizer has them after one step."""
    return {name: value for name, value in _state_of(optimizer, group, dtype).items() if not _is_per_element(value)}


def _state_of(optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype) -> dict[str, object]:
    trial = _trial(optimizer, group, [torch.linspace(-1.0, 2.0, 8).to(dtype)])
    _step(trial, torch.linspace(0.1, 3.0, 8))
    return dict(trial.state[trial.param_groups[0]["params"][0]])


def _is_per_element(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == 8


def _run(
    optimizer: torch.optim.Optimizer, group: int, sizes: list[int], shape: tuple[int, ...] = (-1,)
) -> torch.Tensor:
    """Three steps of a copy of ``optimizer`` on a fixed vector cut into pieces of ``sizes``, each viewed in ``shape``;
    returns the vector.
    """
    pieces = [piece.clone().view(shape) for piece in torch.linspace(-1.0, 2.0, 8).split(sizes)]
    trial = _trial(optimizer, group, pieces)
    for step in range(3):
        _step(trial, torch.sin(torch.arange(8.0) + step) * torch.linspace(0.1, 3.0, 8))
    return torch.cat([piece.flatten() for piece in pieces])


def _run_apart(optimizer: torch.optim.Optimizer, group: int, sizes: list[int]) -> torch.Tensor:
    """As :func:`_run`, with an optimizer of its own for each piece, as each rank has one."""
    pieces = [piece.clone() for piece in torch.linspace(-1.0, 2.0, 8).split(sizes)]
    trials = [_trial(optimizer, group, [piece]) for piece in pieces]
    for step in range(3):
        gradient = torch.sin(torch.arange(8.0) + step) * torch.linspace(0.1, 3.0, 8)
        for trial, part in zip(trials, gradient.split(sizes), strict=True):
            _step(trial, part)
    return torch.cat(pieces)


def _trial(optimizer: torch.optim.Optimizer, group: int, pieces: list[torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` over these tensors, with the options of one of its groups."""
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**_options(optimizer, group), "params": pieces, "lr": 0.05}]
    return trial


def _options(optimizer: torch.optim.Optimizer, group: int) -> dict[str, Any]:
    """The options of a group, whose learning rate does not matter here."""
    left_out = ("params", "param_names", "lr")
    return {key: value for key, value in optimizer.param_groups[group].items() if key not in left_out}


def _step(trial: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    pieces = trial.param_groups[0]["params"]
    for piece, grad in zip(pieces, gradient.split([piece.numel() for piece in pieces]), strict=True):
        piece.grad = grad.to(piece.dtype, copy=True).view(piece.shape)
    private.plain_step(trial)
