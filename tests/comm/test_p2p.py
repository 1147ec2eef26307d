"""Messages between two ranks: whatever their sizes, in order, and never mistaken for one another."""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from shardcore import comm
from shardcore.errors import RankMismatchError
from shardcore.testing import spmd

SIZES = [4, 4, 4, 4, 4, 7, 4, 4, 4, 0, 0, 0, 0, 9, 9, 9, 9, 1, 2, 3, 70000, 70000, 70000, 70000, 5]
"""In runs, so that receives are posted ahead by a size that turns out right, and by one that turns out wrong."""


def content(i: int) -> list[torch.Tensor]:
    """The tensors of message i: floats of its size, and a scalar that tells which it is."""
    return [torch.arange(SIZES[i], dtype=torch.float32) + i, torch.tensor(i)]


@pytest.mark.parametrize("description_nbytes", [3, 5000])
@spmd(world=2)
def test_messages_arrive_in_order(description_nbytes: int) -> None:
    mesh = sc.Mesh(pp=2)
    channel = comm.channels(mesh, "pp", [(0, 1)])[0, 1]
    if mesh.rank == 0:
        for i in range(len(SIZES)):
            channel.send(("F", 1, i), bytes([i]) * description_nbytes, content(i))
        channel.flush()
        return
    pending = [channel.expect(("F", 1, i)) for i in range(2)]
    for i, size in enumerate(SIZES):
        channel.progress()
        message = pending.pop(0).wait()
        assert message.description == bytes([i]) * description_nbytes
        found = comm.unpack(message.payload, [(torch.float32, (size,)), (torch.int64, ())])
        assert all(map(torch.equal, found, content(i)))
        if i + 2 < len(SIZES):
            pending.append(channel.expect(("F", 1, i + 2)))


@spmd(world=2)
def test_kinds_of_messages_share_a_channel() -> None:
    mesh = sc.Mesh(pp=2)
    channel = comm.channels(mesh, "pp", [(1, 0)])[1, 0]
    for i in range(6):
        tags: list[comm.Tag] = [("F", 2, i), ("B", 0, i)]
        if mesh.rank == 1:
            for size, tag in enumerate(tags, start=1):
                channel.send(tag, b"", [torch.full((size,), i)])
        else:
            receipts = [channel.expect(tag) for tag in tags]
            for size, receipt in reversed(list(enumerate(receipts, start=1))):
                assert comm.unpack(receipt.wait().payload, [(torch.int64, (size,))])[0].tolist() == [i] * size
    channel.flush()


@spmd(world=2, grace=30)
def test_another_message_than_expected() -> None:
    mesh = sc.Mesh(pp=2)
    channel = comm.channels(mesh, "pp", [(0, 1)])[0, 1]
    if mesh.rank == 0:
        channel.send(("F", 1, 0), b"", [torch.ones(3)])  # its payload is never received
    else:
        with pytest.raises(RankMismatchError, match="expected 'F of stage 1, micro-batch 1' from rank 0, which sent"):
            channel.expect(("F", 1, 1)).wait()
    channel.abandon()


@spmd(world=3)
def test_channels_are_made_once() -> None:
    mesh = sc.Mesh(pp=3)
    edges = [(0, 1), (1, 2), (2, 0)]
    first, second = comm.channels(mesh, "pp", edges), comm.channels(mesh, "pp", edges)
    assert sorted(first) == sorted(edge for edge in edges if mesh.rank in edge)
    assert all(first[edge] is second[edge] for edge in first)
