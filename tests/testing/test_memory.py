"""Counting live storages: once each, at their current size, now and at the peak."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardcore.testing import PeakTensorBytes, spmd, tensor_bytes, zoo

KIB = 1024


def kib(count: int) -> torch.Tensor:
    """A tensor of ``count`` KiB."""
    return torch.zeros(count * KIB, dtype=torch.uint8)


@pytest.fixture
def before() -> int:
    """Bytes that live already, and go on living: what a graph of autograd holds is garbage only once the graph is."""
    while gc.collect():
        pass
    return tensor_bytes(collect=True)


def test_a_storage_counts_once(before: int) -> None:
    a = kib(4)
    views = [a[:KIB], a.view(2, -1), a.detach(), nn.Parameter(a, requires_grad=False)]
    assert tensor_bytes() - before == 4 * KIB
    del a
    assert tensor_bytes() - before == 4 * KIB, "any view keeps the whole storage"
    del views
    assert tensor_bytes() - before == 0


def test_a_gradient_counts(before: int) -> None:
    p = nn.Parameter(torch.zeros(256))
    (p * 2).sum().backward()
    assert tensor_bytes() - before == 2 * KIB


def test_a_resized_storage_counts_what_it_has(before: int) -> None:
    a = kib(4)
    a.untyped_storage().resize_(0)
    assert tensor_bytes() - before == 0
    a.untyped_storage().resize_(8 * KIB)
    assert tensor_bytes() - before == 8 * KIB


def test_a_predicate_narrows_the_count(before: int) -> None:

    def is_as_large_as_b(storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() == 4 * KIB

    others = tensor_bytes(is_as_large_as_b)
    a, b = kib(1), kib(4)
    assert tensor_bytes(is_as_large_as_b) - others == 4 * KIB
    meta = torch.zeros(KIB, device="meta")
    assert tensor_bytes() - before == a.nbytes + b.nbytes, f"{meta.nbytes} bytes on meta are no memory"


def test_unreachable_cycles_count_until_collected(before: int) -> None:
    gc.disable()
    try:
        cycle: list[object] = [kib(2)]
        cycle.append(cycle)
        del cycle
        assert tensor_bytes() - before == 2 * KIB
        assert tensor_bytes(collect=True) - before == 0
    finally:
        gc.enable()


def test_the_peak_of_a_known_sequence() -> None:
    with PeakTensorBytes() as memory:
        a = kib(3)  # 3
        b = a + 1  # 6
        del a  # 3
        c = torch.cat([b, b])  # 9
        del b, c  # 0
        d = kib(5)  # 5
    assert memory.peak_nbytes - memory.start_nbytes == 9 * KIB
    assert "cat" in memory.peak_operation
    assert d.nbytes == 5 * KIB


def test_the_peak_follows_a_storage_that_is_resized() -> None:
    a, b = kib(8), kib(1)
    a.untyped_storage().resize_(0)
    with PeakTensorBytes() as memory:
        b.add_(1)  # 1
        assert memory.current_nbytes() == memory.start_nbytes
        a.untyped_storage().resize_(8 * KIB)
        b.add_(1)  # 9, though the operation touches b alone
        a.untyped_storage().resize_(0)
        c = b + 1  # 2
        a.untyped_storage().resize_(4 * KIB)
    assert memory.peak_nbytes - memory.start_nbytes == 8 * KIB
    assert c.nbytes == KIB
    assert memory.start_nbytes == tensor_bytes() - 4 * KIB - c.nbytes


def test_the_peak_sees_what_an_operation_shrinks() -> None:
    a, b = kib(4), kib(1)
    with PeakTensorBytes() as memory:
        a.untyped_storage().resize_(6 * KIB)
        a.set_(b)  # 7 before, 1 after
    assert memory.peak_nbytes - memory.start_nbytes == 2 * KIB


def test_the_peak_is_exact_through_backward() -> None:
    """y = tanh(x): forward holds x and y (saved); backward adds the gradients of y and of x."""
    x = torch.zeros(256, requires_grad=True)
    upstream = torch.ones(256)
    with PeakTensorBytes() as memory:
        y = x.tanh()
        assert memory.peak_nbytes - memory.start_nbytes == KIB
        y.backward(upstream)
    assert memory.peak_nbytes - memory.start_nbytes == 2 * KIB, "y is saved, the gradient of x is new"
    assert memory.start_nbytes + 2 * KIB == tensor_bytes(), "y and the gradient of x"
    assert y.nbytes == KIB


def test_what_only_autograd_holds_is_in_the_peak() -> None:
    x = torch.zeros(256, requires_grad=True)
    with PeakTensorBytes() as memory:
        loss = x.exp().exp().sum()  # both results of exp are saved, and no name holds them
        held = memory.current_nbytes() - memory.start_nbytes
    assert held == 2 * KIB + loss.nbytes


def test_a_training_step_is_not_changed_by_counting() -> None:
    losses = []
    for counting in (False, True):
        model = zoo.build("tiny_gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with PeakTensorBytes() if counting else torch.enable_grad():
            for seed in range(2):
                loss = zoo.loss(model, zoo.batch("tiny_gpt", seed, 2))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@spmd(world=2)
def test_buffers_of_collectives_are_seen() -> None:
    mine, everyone = kib(1), kib(2)
    everyone.untyped_storage().resize_(0)
    with PeakTensorBytes() as memory:
        everyone.untyped_storage().resize_(2 * KIB)
        dist.all_gather_single(everyone, mine, async_op=True).wait()
        everyone.untyped_storage().resize_(0)
    assert memory.peak_nbytes - memory.start_nbytes == 2 * KIB
