"""What a block keeps from forward to backward under each policy, found by running it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardcore import _torch_private as private
from shardcore.activation.randomness import RandomState
from shardcore.activation.selective import KEPT_OPERATIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBytes:
    """Bytes kept for one call of a block, parameters and buffers left out. Memory that several tensors show counts
    once.
    """

    none: int
    """Without recomputation: all that autograd saves."""
    selective: int
    """The inputs, and the outputs of matrix products and fused attention."""
    full: int
    """The inputs."""


class _Trace(private.DispatchMode):
    """Sees which memory operations make, and which they find."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = {storage: None for tensor in inputs for storage in _storages(tensor)}
        self.made = dict(self.inputs)
        self.found: dict[torch.UntypedStorage, None] = {}
        """Of tensors that are neither arguments nor made in the call: parameters, buffers, constants."""
        self.kept: dict[torch.UntypedStorage, None] = {}
        self.saved: dict[torch.UntypedStorage, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found.update((storage, None) for storage in _storages((args, kwargs)) if storage not in self.made)
        value = func(*args, **(kwargs or {}))
        new = {storage: None for storage in _storages(value) if storage not in self.found}
        self.made.update(new)
        if func in KEPT_OPERATIONS:
            self.kept.update(new)
        return value

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves this tensor."""
        self.saved.update((storage, None) for storage in _storages(tensor) if storage in self.made)
        return tensor


def measure(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedBytes:
    """Run ``fn(*args, **kwargs)`` once, forward only, and count what a backward would need. Not collective by itself.

    Args:
        fn: a block or function, not recomputed itself; random numbers are afterwards as they were before.
    """
    leaves = private.flatten((args, kwargs))[0]
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)]
    trace = _Trace(inputs)
    hooks = torch.autograd.graph.saved_tensors_hooks(trace.note_saved, lambda tensor: tensor)
    with RandomState().restored(), torch.enable_grad(), hooks, trace:
        output = fn(*args, **kwargs)
    del output
    return SavedBytes(
        none=_nbytes(trace.saved), selective=_nbytes(trace.inputs | trace.kept), full=_nbytes(trace.inputs)
    )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = private.flatten(tree)[0]
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor) and _has_memory(leaf)]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _nbytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)
