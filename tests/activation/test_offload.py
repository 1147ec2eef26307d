"""Inputs in host memory: what was put there comes back, nobody waits for nothing, memory is used again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from activation.blocks import Stack, passes, seeded
from shardcore.activation import keeping
from shardcore.errors import StateError
from shardcore.offload import PassingStore
from shardcore.testing.lanes import CheckedLane
from shardcore.testing.twin import assert_bitwise


def checked_store(seed: int, lanes: list[CheckedLane]) -> PassingStore:
    def make(device: torch.device) -> CheckedLane:
        lanes.append(CheckedLane(seed))
        return lanes[-1]

    return PassingStore(lane_of=make)


@pytest.fixture(params=range(8))
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[CheckedLane]:
    """All stores that are made have lanes that copy late."""
    made: list[CheckedLane] = []
    monkeypatch.setattr(keeping, "PassingStore", lambda: checked_store(request.param, made))
    return made


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_late_copies_change_nothing(lanes: list[CheckedLane], policy: str) -> None:
    plain = seeded(lambda: Stack(6))
    model = sc.activation.wrap(seeded(lambda: Stack(6)), policy=policy, offload="cpu")
    for seed in range(3):
        assert_bitwise(passes(model, seed=seed), passes(plain, seed=seed))
    assert len(lanes) == 1
    assert lanes[0].num_late > 0


def test_interleaved_backwards(lanes: list[CheckedLane]) -> None:
    """As a pipeline runs them: several forwards, and backwards in the order of the forwards, between others."""
    model = sc.activation.wrap(seeded(lambda: Stack(4, rate=0.0)), offload="cpu")
    plain = seeded(lambda: Stack(4, rate=0.0))
    inputs = [torch.randn(3, 5, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def run(module: nn.Module) -> list[Any]:
        losses = [module(x).square().sum() for x in inputs[:3]]
        for i in range(3):
            losses[i].backward()
            losses.append(module(inputs[3 + i]).square().sum())
        del losses[4]  # a graph that is never used
        for loss in losses[3:]:
            loss.backward()
        return [param.grad for param in module.parameters()]

    assert_bitwise(run(model), run(plain))


def test_a_store_gives_back_what_it_took() -> None:
    made: list[CheckedLane] = []
    store = checked_store(3, made)
    tensors = [torch.full((5, 3), float(i)) for i in range(7)]
    away = [store.put(tensor.clone()) for tensor in tensors]
    for i in (6, 5, 4, 0, 1, 6, 2, 3):
        assert_bitwise(away[i].get(), tensors[i])
    assert store.host_nbytes == 7 * 60
    away.clear()
    store.put(torch.ones(5, 3))
    assert store.host_nbytes == 7 * 60
    store.release()
    assert store.host_nbytes == 0


def test_host_memory_is_used_again_in_the_next_step() -> None:
    model = sc.activation.wrap(seeded(lambda: Stack(5)), offload="cpu")
    store = model.blocks[0].forward.settings.keeper.home
    taken = []
    for seed in range(3):
        passes(model, seed=seed)
        gc.collect()
        taken.append(store.host_nbytes)
    assert taken == [5 * 4 * 7 * 4] * 3


@pytest.mark.parametrize(("offload", "num_here"), [(None, 12), ("cpu", 2)])
def test_device_memory_is_freed_behind_the_copies(offload: str | None, num_here: int) -> None:
    """Of 12 inputs, two are still on the device: those whose copies may be under way."""
    model = sc.activation.wrap(seeded(lambda: Stack(12)), offload=offload)
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    loss = model(torch.randn(4, 5)).sum()
    assert sum(storage() is not None for storage in inputs) == num_here
    loss.backward()
    assert all(storage() is None for storage in inputs)


def test_a_fetch_that_nobody_wants_ends_before_its_memory_is_freed() -> None:
    for seed in range(8):
        made: list[CheckedLane] = []
        store = checked_store(seed, made)
        away = [store.put(torch.full((4,), float(i))) for i in range(6)]
        assert_bitwise(away[3].get(), torch.full((4,), 3.0))  # fetches the one before as well
        away.clear()
        for lane in made:
            lane.finish_all()


def test_memory_that_was_used_again_is_another_tensor() -> None:
    keeper = sc.activation.Settings(offload="cpu").keeper
    ones = torch.ones(3, requires_grad=True)
    place, first = None, None
    for value in range(2, 200):
        tensor = ones * value
        if first is None:
            place, first = id(tensor.untyped_storage()), keeper.keep(tensor)
            for _ in range(3):
                keeper.keep(ones * 0.5)  # lets the first one leave
        elif id(tensor.untyped_storage()) == place:
            assert_bitwise(keeper.keep(tensor).take().detach(), torch.full((3,), float(value)))
            return
        del tensor
    pytest.skip("no storage took the place of the first one")


def test_an_input_written_while_it_is_copied_is_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    loss = sc.activation.checkpoint(lambda z: z.exp(), y, offload="cpu").sum()
    y.add_(1)
    with pytest.raises(StateError, match=r"shape \(3,\) was modified by an in-place operation while it was copied"):
        loss.backward()


def test_an_input_written_after_its_copy_is_none() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    loss = sc.activation.checkpoint(lambda z: z.exp(), y, offload="cpu").sum()
    others = [sc.activation.checkpoint(torch.exp, x * i, offload="cpu").sum() for i in range(3)]
    y.data.zero_()  # unseen by autograd: whoever reads the old memory gets zeros
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * torch.full((3,), 2.0).exp())
    del others


def test_a_tensor_passed_to_many_blocks_is_kept_once() -> None:
    memory = torch.randn(6, 7, requires_grad=True) * 1.0
    settings = sc.activation.Settings(offload="cpu")
    total = sum(sc.activation.checkpoint_with(settings, lambda m, k=k: (m * k).sin().sum(), memory) for k in range(4))
    assert settings.keeper.home.host_nbytes == memory.nbytes
    expected = sum((memory.detach() * k).cos() * k for k in range(4))
    torch.testing.assert_close(torch.autograd.grad(total, memory)[0], expected)
