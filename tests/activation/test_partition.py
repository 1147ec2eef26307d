"""Inputs of blocks divided among the ranks of the tensor axis."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

import shardcore as sc
from activation.blocks import Stack, passes, seeded
from shardcore.activation import Settings, checkpoint_with
from shardcore.errors import StateError
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise


def odd(x: torch.Tensor, nothing: None, count: int, tiny: torch.Tensor, flag: bool = True) -> torch.Tensor:
    assert nothing is None
    return (x * tiny.sum()).exp() * count if flag else x


@pytest.mark.parametrize("home", [{}, {"offload": "cpu"}, {"contiguous": True}], ids=str)
@spmd(world=2)
def test_f18_arguments_of_any_size(home: dict[str, Any]) -> None:
    settings = Settings(partition=sc.Mesh(tp=2, device="cpu")["tp"], **home)
    for numel in (1, 2, 3, 8):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        tiny = torch.linspace(0, 1, numel).requires_grad_()
        odd(x.t(), None, 3, tiny * 1.0).sum().backward()
        expected = x.grad, tiny.grad
        x.grad = tiny.grad = None
        checkpoint_with(settings, odd, x.t(), None, 3, tiny * 1.0, flag=True).sum().backward()
        assert_bitwise([x.grad, tiny.grad], list(expected))


@spmd(world=2)
def test_each_rank_keeps_its_half() -> None:
    mesh = sc.Mesh(tp=2, device="cpu")
    for contiguous in (False, True):
        model = sc.activation.wrap(seeded(Stack), partition=mesh, contiguous=contiguous)
        plain = seeded(Stack)
        for seed in range(2):
            assert_bitwise(passes(model, seed=seed), passes(plain, seed=seed))
        home = model.blocks[0].forward.settings.keeper.home
        if contiguous:
            assert home.nbytes == 3 * 4 * 7 * 4 // 2  # three inputs [4, 7] in fp32, half of each
    sc.comm.reset_traffic()
    passes(model)
    assert sc.comm.traffic()["gather"] == 3 * 4 * 7 * 4 // 2
    assert sc.comm.traffic()["gather.calls"] == 3


@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=4)
def test_parameters_sharded_over_all_ranks(stage: int) -> None:
    """Gathers of parameters and of activations take turns; pairs of ranks have the same data and random numbers."""
    mesh, pairs = sc.Mesh(device="cpu"), sc.Mesh(tp=2, device="cpu")
    found = []
    for partition in (False, pairs["tp"]):
        model = seeded(Stack)
        sc.activation.wrap(model, partition=partition, policy="selective")
        sc.shard(model, mesh, stage=stage)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
        torch.manual_seed(pairs.data_rank)
        for _ in range(2):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(sc.state_dict(model, rank0_only=False).values()))
    assert_bitwise(found[1], found[0])


@spmd(world=4)
def test_data_ranks_that_keep_other_activations_run_one_program() -> None:
    """Though the checksums that tensor-parallel ranks compare have fewer digits on some."""
    mesh, pairs = sc.Mesh(device="cpu"), sc.Mesh(tp=2, device="cpu")
    model = sc.shard(torch.nn.Linear(2, 2), mesh, stage=1)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    inputs = (torch.full((2, 2), float(i)) for i in count())
    x = next(each for each in inputs if (sc.comm.fingerprint(each) < 10**9) == bool(pairs.data_rank))
    kept = checkpoint_with(Settings(partition=pairs["tp"]), torch.exp, x.requires_grad_())
    model(kept / kept.detach().max()).sum().backward()
    optimizer.step()
    assert optimizer.step_was_applied


@spmd(world=2)
def test_inputs_that_differ_between_the_ranks_are_refused() -> None:
    """As where the sequence is split over the same ranks already: parts of different tensors must not be joined."""
    mesh = sc.Mesh(tp=2, device="cpu")
    model = sc.activation.wrap(seeded(Stack), partition=mesh["tp"])
    with pytest.raises(StateError, match=r"equal on all ranks of axis 'tp' \(ranks \[0, 1\]\).*Leave partition out"):
        model(torch.full((2, 5), float(mesh.rank), requires_grad=True))


@spmd(world=2)
def test_one_rank_of_the_axis_keeps_inputs_whole() -> None:
    mesh = sc.Mesh(tp=1, device="cpu")
    assert Settings(partition=mesh["tp"]).keeper is None
