"""From what each rank holds to what each rank writes: every element once, about as many bytes on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardcore.checkpoint.crew import Crew
from shardcore.checkpoint.dtypes import dtype_of
from shardcore.checkpoint.holding import Holding, Key, Tensor
from shardcore.errors import RankMismatchError
from shardcore.plan import share_writes


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one of this rank's pieces that this rank writes."""

    piece: int
    start: int
    stop: int


@dataclass(slots=True)
class Share:
    """What all ranks hold together, and what this one writes of it."""

    tensors: dict[Key, Tensor]
    """All tensors of the job, in one order on all ranks."""
    parts: list[Part]
    """In the order of this rank's pieces."""


def share(holding: Holding, crew: Crew) -> Share:
    """Agree on who writes what. Collective.

    Raises:
        RankMismatchError: ranks hold the same tensor with different shapes or dtypes.
    """
    told = crew.tell("what each rank holds", lambda: _told(holding))
    tensors: dict[Key, Tensor] = {}
    numbers: dict[Key, int] = {}
    held: list[list[tuple[int, int, int]]] = []
    parts: dict[tuple[int, Any], int] = {}
    itemsizes: list[int] = []
    for rank, (names, pieces) in zip(crew.axis.ranks, told, strict=True):
        keys = [(role, name) for role, name, _, _ in names]
        for key, (_, _, dtype, shape) in zip(keys, names, strict=True):
            known = tensors.setdefault(key, Tensor(dtype, shape))
            numbers.setdefault(key, len(numbers))
            if known != Tensor(dtype, shape):
                raise RankMismatchError(
                    f"saving a checkpoint: {key[0]} {key[1]!r} is {known.dtype} {known.shape} on another rank and "
                    f"{dtype} {shape} on rank {rank}; all ranks must hold parts of the same model"
                )
        held.append([])
        for i, start, stop, runs in pieces:
            part = (numbers[keys[i]], tuple(runs) if runs else None)
            if part not in parts:
                itemsizes.append(dtype_of(tensors[keys[i]].dtype).itemsize)
            held[-1].append((parts.setdefault(part, len(parts)), start, stop))
    mine = share_writes(held, itemsizes)[crew.rank]
    return Share(tensors, [Part(*part) for part in mine])


def entry_of(holding: Holding, part: Part) -> tuple[str, str, list[int]]:
    """(name, dtype, shape) of a part in this rank's file: the tensor's own where it is all of it, else its range."""
    key = holding.pieces[part.piece].key
    tensor = holding.tensors[key]
    name = key[1] if key[0] == "weight" else f"{key[0]}/{key[1]}"
    runs = holding.pieces[part.piece].runs
    if runs is not None:
        first, length, stride = runs
        name = f"{name}[{first}:{first + length} of each {stride}]"
    elif part.start == 0 and part.stop == torch.Size(tensor.shape).numel():
        return name, tensor.dtype, tensor.shape
    return f"{name}[{part.start}:{part.stop}]", tensor.dtype, [part.stop - part.start]


def shapes_of(holding: Holding, parts: list[Part]) -> list[tuple[str, str]]:
    """The unsharded shapes of the tensors of which the file has ranges, for its metadata."""
    names = [(entry_of(holding, part)[0], holding.tensors[holding.pieces[part.piece].key].shape) for part in parts]
    return [(name, f"unsharded shape {shape}") for name, shape in names if name.endswith("]")]


def _told(holding: Holding) -> list[Any]:
    """This rank's tensors and pieces, in JSON."""
    numbers = {key: i for i, key in enumerate(holding.tensors)}
    names = [[role, name, tensor.dtype, tensor.shape] for (role, name), tensor in holding.tensors.items()]
    return [names, [[numbers[piece.key], piece.start, piece.stop, piece.runs] for piece in holding.pieces]]
