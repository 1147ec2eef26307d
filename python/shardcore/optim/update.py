"""One update of this rank's pieces by the inner optimizer, where their masters and states are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

    def run(self, pieces: Sequence[Piece], factor: float) -> None:
        """Update these pieces with their gradients times ``factor``; other pieces stay as they are."""
        self._link(pieces)
        step_pieces(self.inner, pieces, factor)

    def visit(self, pieces: Sequence[Piece], act: Callable[[Piece], None]) -> None:
        """Call ``act`` for each piece while its tensor and its states are in memory; what it changes is kept."""
        for piece in pieces:
            act(piece)

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


def step_pieces(inner: torch.optim.Optimizer, pieces: Sequence[Piece], factor: float) -> None:
    """One step of ``inner`` for these pieces alone, with their gradients times ``factor``."""
    gradients = [piece.gradient() for piece in pieces]
    if isinstance(inner, CPUOptimizer):
        by_tensor: dict[torch.Tensor, Any] = {p.tensor: g for p, g in zip(pieces, gradients, strict=True)}
        inner.step(grads=by_tensor, grad_scale=factor)
        return
    for piece, gradient in zip(pieces, gradients, strict=True):
        piece.tensor.grad = gradient if factor == 1.0 else gradient.mul_(factor)
    private.plain_step(inner)
    for piece in pieces:
        piece.tensor.grad = None
