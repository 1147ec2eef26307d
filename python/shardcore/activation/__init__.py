"""Activation checkpointing: blocks keep their inputs from forward to backward, and compute the rest again there.

>>> import torch
>>> from shardcore import activation
>>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(16, 2) for _ in range(4)))
>>> model = activation.wrap(model, policy="selective")
>>> model(torch.randn(5, 3, 16)).sum().backward()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from shardcore.activation.measuring import SavedBytes, measure
from shardcore.activation.region import is_inside, run
from shardcore.activation.settings import Settings, check_arguments, partition_axis
from shardcore.activation.wrapping import is_wrapped, recomputes_by_itself, unwrap, wrap

__all__ = [
    "SavedBytes",
    "Settings",
    "checkpoint",
    "checkpoint_with",
    "is_inside",
    "is_wrapped",
    "measure",
    "partition_axis",
    "recomputes_by_itself",
    "unwrap",
    "wrap",
]


def checkpoint(fn: Callable[..., Any], *args: Any, offload: str | None = None, **kwargs: Any) -> Any:
    """Call ``fn(*args, **kwargs)``, keep its inputs, and call it again in backward for everything else.

    Gradients are those of a plain call, to the last bit; the second call draws the same random numbers from all
    generators, under the same autocast. Arguments and outputs may be nested in tuples, lists and dicts, with None and
    numbers among them. ``fn`` must do the same again when called again; collectives in it are repeated in backward.

    Args:
        fn: a module or function. Its parameters must not be updated before backward.
        offload: ``"cpu"``: inputs that take a gradient rest in host memory (pinned where there is CUDA), are copied
            there beside the computation and fetched back ahead of backward. They must not be written to in place.
        *args, **kwargs: of ``fn``.

    Returns:
        What ``fn`` returns.

    Raises:
        ConfigError: an unknown ``offload``, or an argument of torch's checkpoint such as ``use_reentrant``.
        StateError: in backward, parameters of the module ``fn`` were written to since, or an offloaded input was
            written to in place while it was copied.
    """
    check_arguments(kwargs)
    return run(fn, args, kwargs, _settings(offload), module=_module_of(fn))


def checkpoint_with(settings: Settings, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As :func:`checkpoint`, with more to set: policy, partition, buffers, timing."""
    return run(fn, args, kwargs, settings, module=_module_of(fn))


def _module_of(fn: Callable[..., Any]) -> nn.Module | None:
    return fn if isinstance(fn, nn.Module) else None


@cache
def _settings(offload: str | None) -> Settings:
    """One store of host memory for all regions of the process."""
    return Settings(offload=offload)
