"""One update of this rank's pieces by the inner optimizer, where their masters and states are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardcore import _torch_private as private
from shardcore.optim.cpu import CPUOptimizer
from shardcore.optim.hosted import writes_parameters
from shardcore.optim.pieces import Piece
from shardcore.protocols import ShardedGroup


class Update:
    """Masters and states stay where they are, on the device or in host memory; all pieces are updated in one call."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._linked: set[torch.Tensor] = set()

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update these pieces; others stay as they are."""
        self._link(pieces)
        step_pieces(self.inner, pieces)

    def visit(self, pieces: Sequence[Piece], act: Callable[[Piece], None]) -> None:
        """Call ``act`` for each piece while its tensor and its states are in memory; what it changes is kept."""
        for piece in pieces:
            act(piece)

    def read(self, pieces: Sequence[Piece], act: Callable[[Piece], None]) -> None:
        """As :meth:`visit`, for an ``act`` that changes nothing."""
        self.visit(pieces, act)

    def order(self, pieces: Sequence[Piece]) -> list[Piece]:
        """These pieces as the next :meth:`visit` or :meth:`read` of them will come by."""
        return list(pieces)

    def recover(self) -> None:
        """All states are about to be set anew."""

    def writes_parameters(self, group: ShardedGroup) -> bool:
        """Whether ``run`` writes the group's parameters, too."""
        return writes_parameters(self.inner, group)

    def _link(self, pieces: Sequence[Piece]) -> None:
        """Let kernels write the 16-bit parameters in the same pass."""
        if isinstance(self.inner, CPUOptimizer) and any(piece.tensor not in self._linked for piece in pieces):
            self._linked = {piece.tensor for piece in pieces}
            for piece in pieces:
                if writes_parameters(self.inner, piece.group):
                    self.inner.copy_to(piece.tensor, piece.group.own[piece.start : piece.stop])


def step_pieces(inner: torch.optim.Optimizer, pieces: Sequence[Piece]) -> None:
    """One step of ``inner`` for these pieces alone."""
    if isinstance(inner, CPUOptimizer):
        inner.step(grads={piece.tensor: piece.gradient() for piece in pieces})
        return
    for piece in pieces:
        piece.tensor.grad = piece.gradient()
    private.plain_step(inner)
    for piece in pieces:
        piece.tensor.grad = None
