"""Ranks on one machine read each other's memory instead of talking through sockets.

On CPU this halves the copies of a collective and leaves the cores to the model (``benches/micro/collectives.py``).
Ranks of an axis find out together, at its first exchange, whether all of them may; else they stay with gloo.
``SHARDCORE_HOST_LINK=0`` turns it off.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardcore._core import HostLink
from shardcore.comm import watch
from shardcore.errors import RankMismatchError, StateError
from shardcore.mesh import Axis

_CARD_NBYTES = 256
_NUM_SLOTS = HostLink.num_slots()
"""Exchanges that may be under way at once; one more waits for the first of them, as every wait does."""


@dataclass(frozen=True, slots=True)
class LinkWork:
    """One exchange under way, to be waited for as torch's works are."""

    link: HostLink
    sequence: int

    def __del__(self) -> None:
        """Where nobody has waited, let the link give the tensors back soon: peers may still be reading them."""
        if sys.is_finalizing():
            return
        with suppress(RankMismatchError, StateError):
            self.link.wait(self.sequence, watch.PATIENCE_S)

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Return when all ranks have what they need.

        Raises:
            RuntimeError: timed out.
            RankMismatchError: a rank runs another exchange, or is gone.
        """
        if not self.link.wait(self.sequence, timeout.total_seconds()):
            raise RuntimeError(f"exchange {self.sequence} timed out")
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        try:
            return self.link.wait(self.sequence, 0.0)
        except RankMismatchError:
            return True


def exchange(
    link: HostLink, entry: watch.Entry, source: torch.Tensor, pulls: Sequence[tuple[int, int, torch.Tensor]]
) -> LinkWork:
    """Let the axis's ranks read ``source`` until the work is complete, and read from theirs.

    Args:
        pulls: ``(position of the rank, offset in bytes in what it gives, tensor to fill)``.

    Raises:
        RankFailedError: a rank has failed, or is gone.
        RankMismatchError: an earlier exchange has failed.
    """
    if link.num_started >= _NUM_SLOTS:
        watch.wait(LinkWork(link, link.num_started - _NUM_SLOTS), entry)
    try:
        sequence = link.exchange(zlib.crc32(entry.label.encode()), source, pulls)
    except RankMismatchError as error:  # of an exchange under way
        watch.raise_lost_connection(entry, error)
    return LinkWork(link, sequence)


def link_of(axis: Axis) -> HostLink | None:
    """The link between the axis's ranks; None where they are not all on this machine. Collective at its first call."""
    links = watch.board().links
    if axis.key not in links:
        links[axis.key] = _connect(axis)
    return links[axis.key]


def _connect(axis: Axis) -> HostLink | None:
    link, card = _open(axis)
    cards = torch.zeros(axis.size, _CARD_NBYTES, dtype=torch.uint8)
    cards[axis.rank, : len(card)] = torch.tensor(list(card), dtype=torch.uint8)
    _sum(cards, axis, "cards")
    texts = [bytes(row.tolist()).rstrip(b"\0").decode() for row in cards]
    refusals = torch.tensor([0 if link is not None and _accepts(link, texts) else 1])
    _sum(refusals, axis, "refusals")
    return link if not refusals.any() else None


def _open(axis: Axis) -> tuple[HostLink | None, bytes]:
    if os.environ.get("SHARDCORE_HOST_LINK", "1") == "0":
        return None, b""
    try:
        link = HostLink(axis.rank)
    except StateError:
        return None, b""
    return link, link.card().encode()


def _accepts(link: HostLink, cards: list[str]) -> bool:
    try:
        link.connect(cards)
    except StateError:
        return False
    return True


def _sum(tensor: torch.Tensor, axis: Axis, what: str) -> None:
    entry = watch.record(axis, "link", what, tensor.numel())
    work = dist.all_reduce(tensor, group=axis.group, async_op=True)
    if work is not None:
        watch.wait(work, entry)
