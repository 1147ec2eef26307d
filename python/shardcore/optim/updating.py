"""Which update an optimizer's states need, by where they rest; and the one of states in two places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardcore.optim.cpu import CPUOptimizer
from shardcore.optim.hosted import allocate_states, on_host
from shardcore.optim.pieces import Piece
from shardcore.optim.tiled import TiledUpdate
from shardcore.optim.update import Update, step_pieces
from shardcore.protocols import ShardedGroup, ShardedRoot


class SplitUpdate(Update):
    """Some groups are updated on the device by ``inner``, the others by a CPU kernel; each keeps its states with
    ``inner``, under the same names.
    """

    def __init__(self, inner: torch.optim.Optimizer, kernel: CPUOptimizer, pieces: Sequence[Piece]) -> None:
        super().__init__(inner)
        self._on_host = Update(kernel)
        self._pieces = pieces
        for tensor, state in kernel.state.items():
            inner.state[tensor] = state
        kernel.state = inner.state

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update these pieces; others stay as they are. The device is asked first, and works while the CPU does."""
        self._follow_options()
        step_pieces(self.inner, [piece for piece in pieces if not piece.group.updates_on_host])
        self._on_host.run([piece for piece in pieces if piece.group.updates_on_host])

    def writes_parameters(self, group: ShardedGroup) -> bool:
        """Whether ``run`` writes the group's parameters, too."""
        return group.updates_on_host and self._on_host.writes_parameters(group)

    def _follow_options(self) -> None:
        """Give the kernel the present options, and pieces that were cut since."""
        tensors = tensors_on_host(self._pieces, len(self.inner.param_groups))
        for ours, its, params in zip(self.inner.param_groups, self._on_host.inner.param_groups, tensors, strict=True):
            its.update({key: value for key, value in ours.items() if key in its})
            its["params"] = params


def make_update(inner: torch.optim.Optimizer, pieces: list[Piece], roots: Sequence[ShardedRoot]) -> Update:
    """How updates run. Collective over the data-parallel axis.

    Raises:
        StorageError: host memory, or the disk, is too small for the states.
    """
    offload = roots[0].offload
    if offload.states == "nvme":
        return TiledUpdate(inner, pieces, roots[0])
    if offload.states is None:
        return Update(inner)
    if offload.ratio == 1:
        allocate_states(inner, roots[0].data_axis)
        return Update(inner)
    kernel = on_host(inner, roots, tensors_on_host(pieces, len(inner.param_groups)))
    if not isinstance(kernel, CPUOptimizer) or kernel is inner:
        return Update(inner)
    allocate_states(kernel, roots[0].data_axis)
    return SplitUpdate(inner, kernel, pieces)


def tensors_on_host(pieces: Sequence[Piece], num_groups: int) -> list[list[torch.Tensor]]:
    """For each parameter group the pieces that the CPU updates."""
    found: list[list[torch.Tensor]] = [[] for _ in range(num_groups)]
    for piece in pieces:
        if piece.group.updates_on_host:
            found[piece.options].append(piece.tensor)
    return found
