"""Faults that users of other libraries met with sharded gradients and parameters, by their names: buckets, 16-bit
accumulation, deferred reductions, recorded orders.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore import comm
from shardcore.protocols import find_root
from shardcore.testing import run_spmd, spmd
from shardcore.testing.twin import assert_bitwise
from shardcore.zero import gradients
from shardcore.zero.trees import tensors_in
from zero.following import check_follows, reference, rows, seeded
from zero.models import Block, Vector, step_with_gradient
from zero.twin import largest_difference, whole_parameters

STAGES = [0, 1, 2, 3]
all_stages = pytest.mark.parametrize("stage", STAGES)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def play(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 6)).square().mean().backward()


def trained(model: nn.Module, steps: int, *, lr: float = 0.1, **options: Any) -> dict[str, torch.Tensor]:
    """The parameters after ``steps`` of :func:`play`. Collective."""
    mesh = sc.Mesh()
    sc.shard(model, mesh, **options)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=lr, momentum=0.9)
    for step in range(steps):
        play(model, step, mesh.data_rank)
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model)


@all_stages
@spmd(world=2)
def test_b5_the_size_of_buckets_does_not_change_the_result(stage: int) -> None:
    alone = reference(perceptron, play, 2, steps=10, momentum=0.9)
    expected = {name: p.detach() for name, p in alone.named_parameters()}
    for bucket_numel in (1, 7, 64, 10**6):
        found = trained(seeded(perceptron), 10, stage=stage, segment_nbytes=4 * bucket_numel)
        assert largest_difference(found, expected)[0] <= 1e-6, f"bucket of {bucket_numel} elements"


def forty() -> nn.Module:
    """40 parameters in 20 layers, each of them a bucket."""
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(20)))


class _Late:
    """A reduction that takes 20 ms longer than it does."""

    def __init__(self, handle: comm.Handle) -> None:
        self._handle, self._ready = handle, time.monotonic() + 0.02

    def wait(self) -> None:
        time.sleep(max(self._ready - time.monotonic(), 0))
        self._handle.wait()


class _LateReductions:
    """``shardcore.comm`` with late reductions."""

    def __getattr__(self, name: str) -> Any:
        operation = getattr(comm, name)
        return (lambda *args: _Late(operation(*args))) if name in ("reduce_shards", "all_reduce") else operation


@all_stages
@spmd(world=2)
def test_b6_slow_reductions_under_backward_change_no_bit(stage: int) -> None:
    options = {"stage": stage, "segment_nbytes": 4 * 42, "units": [nn.Linear]}
    prompt = trained(seeded(forty), 2, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "comm", _LateReductions())
        assert_bitwise(trained(seeded(forty), 2, **options), prompt)


class Sizes(nn.Module):
    """Parameters of 3, 11, 4 and 1 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(numel)) for numel in (3, 11, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x[:, : part.numel()] * part).sum(-1) for part in self.parts)  # type: ignore[return-value]


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_b7_buckets_smaller_than_a_parameter_with_reduction_in_bf16(stage: int) -> None:
    mesh = sc.Mesh()
    model = sc.shard(seeded(Sizes), mesh, stage=stage, segment_nbytes=16, precision=sc.Precision(reduce="bf16"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)

    def step_of(each: nn.Module, step: int, rank: int) -> None:
        each(rows(step, rank, 4, 11)).square().mean().backward()

    for step in range(3):
        step_of(model, step, mesh.rank)
        optimizer.step()
        optimizer.zero_grad()
    alone = reference(Sizes, step_of, 2, steps=3)
    expected = {name: p.detach() for name, p in alone.named_parameters()}
    assert 0 < largest_difference(whole_parameters(model), expected)[0] <= 2e-2


@spmd(world=2)
def test_b11_gradients_in_bf16_are_zeroed_and_divided_once() -> None:
    """The same batch at rate 0 gives the same norm each time, and stage 0 trains as stage 1."""
    mesh, norms = sc.Mesh(), []
    model = sc.shard(seeded(perceptron), mesh, stage=0, precision=sc.Precision(param="bf16"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.0)
    optimizer.track_grad_norm = True
    for _ in range(5):
        play(model, 0, mesh.rank)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    alone = seeded(perceptron).bfloat16()
    for rank in range(2):
        (alone(rows(0, rank, 4, 6).bfloat16()).square().mean() / 2).backward()
    norm = torch.stack([p.grad.float().norm() for p in alone.parameters() if p.grad is not None]).norm()
    assert norms == pytest.approx([float(norm)] * 5, rel=2e-2)
    assert len(set(norms)) == 1
    bf16 = sc.Precision(param="bf16")
    assert_bitwise(*(trained(seeded(perceptron), 5, stage=stage, precision=bf16) for stage in (0, 1)))


def train_over_two_meshes() -> None:
    """One model over four ranks, one over two pairs of copies: every element of both is trained, everywhere."""
    models = [sc.shard(seeded(perceptron), mesh, stage=2) for mesh in (sc.Mesh(), sc.Mesh(replicate=2))]
    start = dict(seeded(perceptron).named_parameters())
    optimizers = [sc.optimizer(torch.optim.SGD, model, lr=0.1) for model in models]
    for model in models:
        play(model, 0, sc.Mesh().rank)
    results = []
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        found = whole_parameters(model)
        assert all((found[name] != start[name]).all() for name in found)
        everywhere = comm.exchange({name: p.tolist() for name, p in found.items()}, sc.Mesh()["dp"], "test")
        assert all(each == everywhere[0] for each in everywhere)
        results.append(found)
    assert largest_difference(*results)[0] <= 1e-6


def test_b31_models_over_different_groups_of_ranks_update_every_element() -> None:
    run_spmd(train_over_two_meshes, 4)


@all_stages
@spmd(world=2)
def test_b34_the_last_micro_batch_is_reduced_with_the_others(stage: int) -> None:
    """bf16, four micro-batches: the update is their mean over both ranks, to the same bits on all ranks."""
    mesh = sc.Mesh()
    model = sc.shard(Vector(4), mesh, stage=stage, precision=sc.Precision(param="bf16"))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=1.0)
    grads = [[float(2 ** (micro + 2 * rank)) for micro in range(4)] for rank in range(2)]
    for micro in range(4):
        (model(torch.full((1, 4), grads[mesh.rank][micro])).mean() / 4).backward()
    optimizer.step()
    mean = sum(sum(each) for each in grads) / 8
    everywhere = comm.exchange(whole_parameters(model)["weight"].float().tolist(), mesh["dp"], "test")
    assert everywhere == [[-float(torch.tensor(mean).bfloat16())] * 4] * 2


@all_stages
@spmd(world=2)
def test_b36_deferred_reductions_are_counted(stage: int) -> None:
    """Three micro-batches, the first two under no_sync: each group is reduced once in the window."""
    mesh, num_micro = sc.Mesh(), 3
    model = sc.shard(seeded(perceptron), mesh, stage=stage)
    root: Any = find_root(model)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    operation = "all-reduce.calls" if stage == 0 else "reduce.calls"
    for _ in range(2):
        comm.reset_traffic()
        for micro in range(num_micro):
            with sc.no_sync(model) if micro < num_micro - 1 else nullcontext():
                play(model, micro, mesh.rank)
        optimizer.step()
        optimizer.zero_grad()
        flags = 1 if stage == 0 else 0
        assert comm.traffic()[operation] == len(root.groups) + flags
    assert root.window.suspended is False, "as it was found"


@all_stages
@spmd(world=2)
def test_b39_outputs_of_each_micro_batch_are_those_before_the_step(stage: int) -> None:
    mesh = sc.Mesh()
    model, alone = sc.shard(seeded(perceptron), mesh, stage=stage), seeded(perceptron)
    for micro in range(3):
        x = rows(micro, mesh.rank, 4, 6)
        out = model(x)
        torch.testing.assert_close(out, alone(x))
        (out.square().mean() / 3).backward()


@all_stages
@spmd(world=2)
def test_b2_the_split_into_micro_batches_does_not_change_the_result(stage: int) -> None:
    """Six rows per rank as 1, 2 and 3 micro-batches."""
    mesh, results = sc.Mesh(), []
    for num_micro in (1, 2, 3):
        model = sc.shard(seeded(perceptron), mesh, stage=stage)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        for step in range(3):
            for x in rows(step, mesh.rank, 6, 6).chunk(num_micro):
                (model(x).square().mean() / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole_parameters(model))
    assert all(largest_difference(found, results[0])[0] <= 1e-6 for found in results)


class Sometimes(nn.Module):
    """Uses its second block where the first row says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if x[0, 0] > 0 else x


@spmd(world=2)
def test_c4_recorded_orders_stay_bounded_and_notes_few() -> None:
    """50 rounds of a training step, a pass without gradients, and evaluation, with a branch that depends on data."""
    notes: list[Any] = []
    handler = _Collector(notes)
    handler.attach()
    lengths: list[int] = []

    def play_round(model: nn.Module, step: int, rank: int) -> None:
        x = rows(step, 0, 4, 7)  # the same on all ranks
        if find_root(model) is not None:
            with torch.no_grad():
                model(x)
                model.eval()(x)
            model.train()
            root: Any = find_root(model)
            lengths.append(len(root._program._known) + len(root._program._current))
        model(x).square().mean().backward()

    try:
        check_follows(Sometimes, play_round, stage=3, steps=50, tolerance=1e-5)
    finally:
        handler.detach()
    assert len(notes) <= 1
    assert max(lengths) <= 40


class _Collector:
    """Keeps what the library logs."""

    def __init__(self, notes: list[Any]) -> None:
        self._logger = logging.getLogger("shardcore")
        self._handler = logging.Handler()
        self._handler.emit = notes.append  # type: ignore[method-assign]

    def attach(self) -> None:
        self._logger.addHandler(self._handler)

    def detach(self) -> None:
        self._logger.removeHandler(self._handler)


class ManySmall(nn.Module):
    """100 parameters of 12 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(12)) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.parts)).sum(0) * x).sum()


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(world=2)
def test_c25_the_number_of_reductions_follows_from_the_size_of_buckets(stage: int) -> None:
    """100 parameters of 48 bytes, as aligned, in buckets of ten: ten reductions in each step."""
    mesh = sc.Mesh()
    model = sc.shard(ManySmall(), mesh, stage=stage, segment_nbytes=4 * 120)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1)
    counts = []
    for step in range(5):
        comm.reset_traffic()
        model(rows(step, mesh.rank, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(comm.traffic()["reduce.calls"])
    assert counts == [10] * 5


@all_stages
@spmd(world=2)
def test_n3_one_inf_in_bf16_leaves_weights_and_moments_finite(stage: int) -> None:
    """By default: the step is skipped on all ranks, though one alone saw the inf."""
    mesh = sc.Mesh()
    model = sc.shard(Vector(4), mesh, stage=stage, precision=sc.Precision(param="bf16"))
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
    for step in range(4):
        bad = step == 1 and mesh.rank == 1
        step_with_gradient(model, optimizer, [float("inf") if bad else 1.0, 2.0, 3.0, 4.0])
    assert optimizer.num_skipped_steps == 1
    found = whole_parameters(model)["weight"]
    assert found.isfinite().all()
    assert (found != 0).all()
    tensors = list(tensors_in(optimizer.state_dict()))
    assert tensors or (stage and mesh.rank), "the first rank's shard holds all four elements"
    assert all(v.isfinite().all() for v in tensors)
    everywhere = comm.exchange(found.float().tolist(), mesh["dp"], "test")
    assert everywhere[0] == everywhere[1]


@spmd(world=2)
def test_n13_values_of_different_number_are_exchanged_whole() -> None:
    mesh = sc.Mesh()
    mine = [float(10 * mesh.rank + i) for i in range(3 + 2 * mesh.rank)]
    found = comm.exchange(mine, mesh["dp"], "metric")
    assert [value for each in found for value in each] == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0, 14.0]
