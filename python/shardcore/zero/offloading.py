"""``offload_states`` and ``reload_states``: training state moves to host memory for a while, and back, exactly.

Between training phases the device's memory is wanted for something else (generation in reinforcement learning). Each
storage is copied to the host and resized to nothing in place, so that all views of it are valid again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from shardcore.errors import ConfigError, StateError
from shardcore.zero.gradients import GroupGradients
from shardcore.zero.root import Root
from shardcore.zero.sessions import root_of

STATES = ("lp_params", "hp_params", "optim_states", "lp_grads", "contiguous_grad_buffer")


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Gradients that were on the parameters."""

    grads: GroupGradients
    indices: list[int]

    def bring_back(self, non_blocking: bool) -> None:
        """Put them back."""
        self.grads.show(self.indices)


@dataclass(frozen=True, slots=True)
class _Parked:
    """One storage that is away: where it was, and its bytes on the host."""

    storage: torch.UntypedStorage
    host: torch.Tensor

    def bring_back(self, non_blocking: bool) -> None:
        """Take the memory again and fill it."""
        self.storage.resize_(self.host.numel())
        _bytes_of(self.storage).copy_(self.host, non_blocking=non_blocking)


def offload_states(
    model: nn.Module,
    include: Iterable[str] | None = None,
    device: str = "cpu",
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move states of a sharded model, and of its optimizers, to host memory, and free their place. Not collective, but
    every rank calls it. Meanwhile whatever needs them raises :class:`StateError`; with parameters here
    (``include`` without ``"lp_params"``) the model still runs forward.

    Args:
        include: of ``lp_params`` (the parameters), ``hp_params`` (their fp32 masters, where parameters are 16-bit),
            ``optim_states``, ``lp_grads`` (whole gradient buffers) and ``contiguous_grad_buffer`` (reduced gradients);
            None means all. States that do not exist, or are away already, are passed over.
        pin_memory: on CUDA, take pinned host memory, which is faster.
        non_blocking: on CUDA, do not wait for the copies to the host; the memory is freed in stream order.

    Raises:
        ConfigError: another device than the CPU, or an unknown state (a ValueError).
        StateError: a forward, backward or context with whole parameters is open.
    """
    if device != "cpu":
        raise ConfigError(f"offload_states(device={device!r}): expected 'cpu', the one place states can wait in")
    wanted = _checked(include)
    root = root_of(model)
    if root.is_passing or root.backward_running or root.sessions:
        raise StateError("offload_states() during a pass of the model or inside summon: finish it first")
    root.rest()
    root.about_to_change()
    pinned = pin_memory and root.device.type == "cuda"
    for state in wanted - root.offloaded:
        # What rests in host memory is not on the device, also where that is the CPU: its storages have a fixed place.
        found = {t.untyped_storage() for t in _TENSORS[state](root) if t.device == root.device}
        found = {storage for storage in found if storage.resizable()}
        root.parked[state] = [_park(storage, pinned, non_blocking) for storage in _unique(found)]
        root.offloaded.add(state)
        if state == "lp_grads":
            root.parked[state] += [_Hidden(grads, grads.hide()) for grads in _finished(root) if grads.exposed]
    if "lp_params" in wanted:
        for group in root.groups:
            group.guard()


def reload_states(model: nn.Module, non_blocking: bool = False) -> None:
    """Bring back what :func:`offload_states` moved away, to the last bit; nothing where nothing is away.

    Args:
        non_blocking: on CUDA, let the copies run in stream order without waiting for them on the host.
    """
    root = root_of(model)
    for parked in root.parked.values():
        for one in parked:
            one.bring_back(non_blocking)
    if root.device.type == "cuda" and not non_blocking:
        torch.cuda.current_stream(root.device).synchronize()
    root.parked.clear()
    root.offloaded.clear()
    root.watch()


def _checked(include: Iterable[str] | None) -> set[str]:
    names = STATES if include is None else [str(getattr(name, "value", name)) for name in include]
    for name in names:
        if name not in STATES:
            near = get_close_matches(name, STATES, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"known: {', '.join(STATES)}"
            raise ConfigError(f"offload_states(include=...): unknown state {name!r}; {hint}")
    return set(names)


def _parameters(root: Root) -> list[torch.Tensor]:
    for group in root.groups:
        if not group.releases:
            group.complete()
        group.invalidate_copies()  # the next gather makes them anew
    here = [group for group in root.groups if not group.rests_on_disk]
    return [group.own if group.releases else group.full for group in here]


def _masters(root: Root) -> list[torch.Tensor]:
    for group in root.groups:
        group.adopt_edits_if_any()
    return [group.master for group in root.groups if group.has_masters]


def _whole_grads(root: Root) -> list[torch.Tensor]:
    return [buffer for grads in _finished(root) for buffer in grads.buffers(whole=True)]


def _grad_shards(root: Root) -> list[torch.Tensor]:
    return [buffer for grads in _finished(root) for buffer in grads.buffers(whole=False)]


def _finished(root: Root) -> list[GroupGradients]:
    found = [group.grads for group in root.groups if group.grads is not None]
    for grads in found:
        grads.finish_reduce()
    return found


def _optimizer_states(root: Root) -> list[torch.Tensor]:
    return [tensor for optimizer in root.live_optimizers() for tensor in optimizer.states()]


_TENSORS: dict[str, Callable[[Root], list[torch.Tensor]]] = {
    "lp_params": _parameters,
    "hp_params": _masters,
    "optim_states": _optimizer_states,
    "lp_grads": _whole_grads,
    "contiguous_grad_buffer": _grad_shards,
}


def _unique(storages: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Each memory once; what another state has parked is empty by now."""
    by_address = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
    return list(by_address.values())


def _park(storage: torch.UntypedStorage, pinned: bool, non_blocking: bool) -> _Parked:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    host.copy_(_bytes_of(storage), non_blocking=non_blocking)
    storage.resize_(0)
    return _Parked(storage, host)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
