"""Which part of a sequence each rank of the context axis has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardcore.errors import ConfigError
from shardcore.mesh import Axis, Mesh

if TYPE_CHECKING:
    from collections.abc import Sequence


def context_axis(axis: Axis | Mesh) -> Axis:
    """The context axis of a mesh, or the axis itself."""
    return axis["cp"] if isinstance(axis, Mesh) else axis


def part_of_sequence(
    x: torch.Tensor, axis: Axis | Mesh, dim: int = 1, *, balanced: bool = False, unit: str = "sequence"
) -> torch.Tensor:
    """This rank's part of a tensor that all ranks of the context axis have, along ``dim``. Not collective.

    Args:
        balanced: the sequence is cut into twice as many pieces as ranks, and rank i has the i-th from either end: under
            a causal mask every rank then has the same work. Otherwise parts are in the order of ranks.

    Raises:
        ConfigError: the pieces do not divide the sequence.
    """
    axis = context_axis(axis)
    pieces = _pieces(axis, balanced=balanced)
    length, num_pieces = x.shape[dim], len(pieces) * axis.size
    if length % num_pieces:
        raise ConfigError(
            f"{unit}: dim {dim} of shape {tuple(x.shape)} does not split into {num_pieces} pieces for the {axis.size} "
            f"ranks of axis {axis.name!r}; pad the sequence to a multiple of {num_pieces}"
        )
    chunks = x.chunk(num_pieces, dim)
    return chunks[pieces[0]] if len(pieces) == 1 else torch.cat([chunks[i] for i in pieces], dim)


def positions_of_part(
    length: int, axis: Axis | Mesh, *, balanced: bool = False, device: torch.device | None = None
) -> torch.Tensor:
    """``[length / ranks]`` where in a sequence of ``length`` this rank's part lies, as :func:`part_of_sequence`."""
    return part_of_sequence(torch.arange(length, device=device), axis, 0, balanced=balanced)


def _pieces(axis: Axis, *, balanced: bool) -> Sequence[int]:
    return (axis.rank, 2 * axis.size - 1 - axis.rank) if balanced else (axis.rank,)
