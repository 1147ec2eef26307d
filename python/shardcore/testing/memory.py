"""Bytes of live tensor storages, each storage counted once: now, and at the peak of a region."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch

from shardcore._torch_private import DispatchMode, without_torch_function

Predicate = Callable[[torch.UntypedStorage], bool]


def tensor_bytes(predicate: Predicate | None = None, *, collect: bool = False) -> int:
    """Bytes of all storages that a tensor of this process holds, each counted once, at their current size.

    Tensors are found through Python's garbage collector, with their ``.grad``: what lives only inside an autograd
    graph, and was never a Python object, is not seen (``PeakTensorBytes`` sees it). Storages on the meta device have
    no memory and count nothing. ``predicate`` narrows the count, to one device for instance; ``collect`` runs the
    garbage collector first, so that unreachable cycles do not count.
    """
    if collect:
        gc.collect()
    return sum(storage.nbytes() for storage in _live_storages() if predicate is None or predicate(storage))


class PeakTensorBytes:
    """Context manager that finds the peak of live storage bytes while a region runs.

    A sample is taken after every operation that torch dispatches, in forward, backward and optimizer alike, while its
    inputs and outputs are alive together (and before it too, if it may shrink its input). It adds up the current
    ``nbytes()`` of all storages known, so a storage resized to 0 and back counts what it has at that moment, also if
    nothing but ``untyped_storage().resize_()`` touched it. Known are the storages found by ``tensor_bytes`` on entry,
    and those of every operation's inputs and outputs since, until they are freed.

    The peak is thus exact for tensors, except for memory that comes and goes between two operations, or within one
    (the workspace of a kernel, temporaries of an operation written in Python). One sample costs a fraction of a
    microsecond per live storage.
    """

    def __init__(self, predicate: Predicate | None = None) -> None:
        self._predicate = predicate
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._mode = _SamplingMode(self)
        self.start_nbytes = 0
        """Live bytes on entry."""
        self.peak_nbytes = 0
        """Most live bytes of any sample so far."""
        self.peak_operation = ""
        """The operation around which the peak was found; empty if it was on entry or exit."""

    def __enter__(self) -> Self:
        self._known.clear()
        self._add(_live_storages())
        self.start_nbytes = self.peak_nbytes = self.current_nbytes()
        self.peak_operation = ""
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._mode.__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._sample("")
        self._known.clear()

    def current_nbytes(self) -> int:
        """Live bytes of the storages known now."""
        nbytes = 0
        for reference in list(self._known.values()):
            storage = reference()
            if storage is not None:
                nbytes += storage.nbytes()
        return nbytes

    def _sample(self, operation: str) -> None:
        nbytes = self.current_nbytes()
        if nbytes > self.peak_nbytes:
            self.peak_nbytes, self.peak_operation = nbytes, operation

    def _add(self, storages: Iterable[torch.UntypedStorage]) -> None:
        # torch keeps one Python object per storage for as long as the storage lives, so a weak reference to that
        # object dies exactly with the memory, and its id is the storage's identity.
        known = self._known
        for storage in storages:
            key = id(storage)
            if key in known or (self._predicate is not None and not self._predicate(storage)):
                continue
            known[key] = weakref.ref(storage, lambda _, key=key: known.pop(key, None))  # type: ignore[misc]


class _SamplingMode(DispatchMode):
    def __init__(self, owner: PeakTensorBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = self._owner
        owner._add(_storages_in((args, kwargs)))
        if torch.Tag.inplace_view in getattr(func, "tags", ()):
            owner._sample(str(func))
        result = func(*args, **kwargs)
        owner._add(_storages_in(result))
        owner._sample(str(func))
        return result


def _live_storages() -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    # `type`, not `isinstance`: asking a lazy proxy for its class may run its code.
    for thing in gc.get_objects():
        cls = type(thing)
        if issubclass(cls, torch.UntypedStorage):
            found[id(thing)] = thing
        elif issubclass(cls, torch.Tensor):
            found.update((id(storage), storage) for storage in _storages_of(thing))
    return [storage for storage in found.values() if storage.device.type != "meta"]


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Storages behind one tensor: its own or those of the tensors it wraps, and its gradient's."""
    found: list[torch.UntypedStorage] = []
    with without_torch_function():
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                found += _storages_of(getattr(tensor, name))
        elif tensor.layout is torch.strided:
            found.append(tensor.untyped_storage())
        if tensor.is_leaf and tensor.grad is not None:
            found += _storages_of(tensor.grad)
    return found


def _storages_in(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of the tensors among the (nested) arguments or results of an operation."""
    if isinstance(tree, torch.Tensor):
        for storage in _storages_of(tree):
            if storage.device.type != "meta":
                yield storage
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _storages_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _storages_in(item)
