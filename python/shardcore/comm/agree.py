"""Small values on which ranks must agree: plans at start, flags and norms at each step."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardcore.comm import watch
from shardcore.comm.collectives import all_reduce, broadcast
from shardcore.errors import RankMismatchError
from shardcore.mesh import Axis

if TYPE_CHECKING:
    from shardcore.comm.program import Program


def exchange(value: Any, axis: Axis, what: str) -> list[Any]:
    """Every rank's ``value`` (JSON-like), in rank order along the axis. Collective over the axis."""
    if axis.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.zeros(axis.size, dtype=torch.int64)
    length[axis.rank] = mine.numel()
    all_reduce(length, axis, f"{what} (length)").wait()
    values = []
    for source, numel in enumerate(length.tolist()):
        data = mine if source == axis.rank else torch.empty(numel, dtype=torch.uint8)
        broadcast(data, axis, source, what).wait()
        values.append(json.loads(bytes(data.tolist())))
    return values


def agree_on(
    what: str, digest: str, detail: str, axis: Axis, first_difference: Callable[[str, str], str | None]
) -> None:
    """Raise on every rank unless all ranks of the axis hold the same ``digest``. Collective over the axis.

    Args:
        what: the thing compared, for the message.
        detail: a text from which ``first_difference(mine, theirs)`` tells where two ranks part; sent only on a
        mismatch.
    """
    digests = exchange(digest, axis, what)
    if len(set(digests)) == 1:
        return
    details = exchange(detail, axis, what)
    common = max(set(digests), key=lambda d: (digests.count(d), d == digests[0]))
    odd = [axis.ranks[i] for i, d in enumerate(digests) if d != common]
    rest = [axis.ranks[i] for i, d in enumerate(digests) if d == common]
    left, right = details[digests.index(common)], details[axis.ranks.index(odd[0])]
    raise RankMismatchError(
        f"{what} differs between ranks {rest} and ranks {odd} of axis {axis.name!r}: "
        f"{first_difference(left, right) or 'no difference found in detail'}. All ranks must build the same model "
        "with the same settings"
    )


def max_over_ranks(flags: torch.Tensor, axis: Axis, what: str, program: Program | None = None) -> torch.Tensor:
    """The element-wise maximum of a CPU tensor over the axis, in place. Collective."""
    all_reduce(flags, axis, what, program, maximum=True).wait()
    return flags


def sum_over_ranks(value: torch.Tensor, axis: Axis, what: str) -> torch.Tensor:
    """The sum of a small tensor over the axis, in place. Collective."""
    all_reduce(value, axis, what).wait()
    return value


def note_alike(axis: Axis, what: str, unit: str, value: torch.Tensor) -> None:
    """Note what every rank must do alike and with the same values, although nothing is exchanged by it: ranks that did
    not are told at the next comparison, at the latest in the next step. Not collective.
    """
    if axis.size > 1:
        watch.record(axis, what, f"{unit} (checksum {fingerprint(value):08x})", value.numel())


def note_choice(axis: Axis, what: str, choice: str) -> None:
    """As :func:`note_alike`, of settings that every rank must choose alike, told in words. Not collective."""
    if axis.size > 1:
        watch.record(axis, what, choice, 0)


def fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of the values, to compare tensors across ranks."""
    # A copy: memory that numpy has seen can no longer be resized.
    flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
