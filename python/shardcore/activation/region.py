"""One call that keeps its inputs from forward to backward, and computes everything else again there.

The machinery is torch's non-reentrant checkpoint: hooks on what autograd saves leave the tensors of the region out, and
run the region again when backward asks for the first of them. Here the inputs are found in nested arguments, the random
numbers of all generators are repeated, and activations among the inputs may rest elsewhere meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardcore import _torch_private as private
from shardcore.activation import selective
from shardcore.activation.buffers import Buffers
from shardcore.activation.keeping import Keeper, Kept
from shardcore.activation.randomness import RandomState
from shardcore.activation.settings import Settings
from shardcore.activation.timing import Timer
from shardcore.activation.weights import Weights


class _Depth(threading.local):
    """Of each thread: CUDA backwards run in one of their own."""

    regions = 0


_depth = _Depth()


def is_inside() -> bool:
    """Whether this thread runs a recomputed region, for the first time or again."""
    return _depth.regions > 0


class Region:
    """A function with its arguments. Called for the first time it takes the caller's own containers; called again, new
    ones around the tensors that were kept, so that what the function did to the caller's is done once.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keeper: Keeper | None,
        module: nn.Module | None,
    ) -> None:
        self._fn = fn
        self._weights = None if module is None else Weights(module)
        self._buffers = None if module is None else Buffers(module)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._leaves, self._structure = private.flatten((args, kwargs))
        self._kept: dict[int, Kept] = {}
        self._places: list[int] = []
        self.inputs: list[torch.Tensor] = []
        """Tensors that autograd is to keep; parameters are none, they stay where they are."""
        for i, leaf in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                self._put_away(i, leaf, keeper)
        self._random: RandomState | None = None

    def _put_away(self, place: int, tensor: torch.Tensor, keeper: Keeper | None) -> None:
        self._leaves[place] = None
        kept = None if keeper is None else keeper.keep(tensor)
        if kept is not None:
            self._kept[place] = kept
        else:
            self._places.append(place)
            self.inputs.append(tensor)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the function."""
        given, self._given = self._given, None
        _depth.regions += 1
        try:
            if given is not None:
                return self._first(*given)
            return self._again(inputs)
        finally:
            _depth.regions -= 1

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._random = RandomState()
        output = self._fn(*args, **kwargs)
        if self._buffers is not None:
            self._buffers.end_first_run()
        return output

    def _again(self, inputs: Sequence[torch.Tensor]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, inputs, strict=True):
            leaves[place] = tensor
        for place, kept in self._kept.items():
            leaves[place] = kept.take()
        args, kwargs = private.unflatten(leaves, self._structure)
        if self._weights is not None:
            self._weights.check()
        if self._random is None:
            raise RuntimeError("a region was recomputed before its first run")
        with self._random.restored(), nullcontext() if self._buffers is None else self._buffers.restored():
            return self._fn(*args, **kwargs)


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    *,
    module: nn.Module | None = None,
    name: str = "",
) -> Any:
    """Call ``fn``, to be called again in backward; without gradients it is called as it is.

    Args:
        module: whose parameters ``fn`` uses, as far as it is known.
        name: of the region, for what is logged.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if torch.compiler.is_compiling() and settings.is_traceable:
        if settings.policy == "selective":
            return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=selective.compiled_contexts, **kwargs)
        return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)
    return _run_eagerly(fn, args, kwargs, settings, module, name)


@private.not_traced
def _run_eagerly(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    module: nn.Module | None,
    name: str,
) -> Any:
    # Inside another region an input is kept by that one, as everything it saves is: not at all.
    region = Region(fn, args, kwargs, keeper=None if is_inside() else settings.keeper, module=module)
    inputs, region.inputs = region.inputs, []  # autograd keeps them from here on
    call: Callable[..., Any] = region
    if settings.synchronize or settings.profile:
        call = Timer(region, name, settings)
    if settings.policy == "selective":
        return torch_checkpoint(
            call,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=selective.contexts,
        )
    return torch_checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False)
