"""What the computations of a step take, and what they leave in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardcore.pipeline.split import Closure


class Meter:
    """Collects, by stage, seconds of forwards (F), input gradients (I) and weight gradients (W), and bytes held.

    A device is waited for around each computation, so steps with a meter are slower than others.

    Args:
        counts_memory: count bytes instead of seconds, since counting takes time itself.
    """

    def __init__(self, device: torch.device, *, counts_memory: bool) -> None:
        self._device = device
        self._counts_memory = counts_memory
        self.seconds: dict[tuple[str, int], list[float]] = {}
        """By kind and stage, one entry for each micro-batch; time in which other ranks are waited for is not in it."""
        self.activation_nbytes: dict[int, int] = {}
        """By stage, the most that autograd keeps of a micro-batch from F to I; weights do not count."""
        self.stash_nbytes: dict[int, int] = {}
        """The most that is kept of it from I to W."""
        self.message_nbytes: dict[int, int] = {}
        """The largest output that goes to the next stage."""

    def computation(self, kind: str, stage: int) -> AbstractContextManager[None]:
        """Measure what runs inside."""
        if not self._counts_memory:
            return self._timed(kind, stage)
        return self._counted(stage) if kind == "F" else nullcontext()

    def note_stash(self, stage: int, closures: Iterable[Closure]) -> None:
        """These weight gradients wait for their W."""
        if self._counts_memory:
            held = (each for closure in closures for each in closure.args if isinstance(each, torch.Tensor))
            _keep_most(self.stash_nbytes, stage, sum(_storages(held).values()))

    def note_message(self, stage: int, tensors: Iterable[torch.Tensor]) -> None:
        """A stage's output that goes to the next one."""
        if self._counts_memory:
            _keep_most(self.message_nbytes, stage, sum(each.numel() * each.element_size() for each in tensors))

    @contextmanager
    def _timed(self, kind: str, stage: int) -> Iterator[None]:
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds.setdefault((kind, stage), []).append(time.perf_counter() - start)

    @contextmanager
    def _counted(self, stage: int) -> Iterator[None]:
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)):
                kept.append(tensor.detach())
            return tensor.detach()  # the tensor itself may be the output of what saves it, which would keep itself

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        _keep_most(self.activation_nbytes, stage, sum(_storages(kept).values()))


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was told to; the CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address: tensors that share memory count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _keep_most(most: dict[int, int], stage: int, nbytes: int) -> None:
    most[stage] = max(most.get(stage, 0), nbytes)
