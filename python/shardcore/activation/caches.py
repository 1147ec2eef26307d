"""Caches of keys and values, as Hugging Face's blocks take them: a block that is run again would add to them again."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from torch import nn

_log = logging.getLogger("shardcore")


def without_empty_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a block without caches, so that it can be run again; None if it cannot.

    In training a cache that is empty so far serves nobody: Hugging Face's models make one unless they are told not to.
    A cache with a prefix in it, or one that is filled in evaluation mode, counts, so such a call keeps its activations.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    index = next((vars(part)["layer_idx"] for part in module.modules() if "layer_idx" in vars(part)), 0)
    if not module.training or any(_length(each, index) for each in caches):
        return None
    _warn_dropped(type(module).__name__)
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _length(cached: Any, index: int | None) -> int:
    """Tokens in the cache of one layer. Layers that come later may not be there yet."""
    try:
        return int(cached.get_seq_length(index or 0))
    except IndexError:
        return 0


@cache
def _warn_dropped(block: str) -> None:
    _log.info(
        "use_cache has no effect on blocks of class %s while they train with activation checkpointing: they would be "
        "run twice, and fill the cache twice",
        block,
    )
