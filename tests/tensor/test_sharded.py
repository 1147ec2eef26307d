"""Tensor parallelism under every ZeRO stage: the training of one process on the whole batch, and its gradient norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.protocols import find_pieces
from shardcore.tensor import ColumnParallelLinear
from shardcore.testing import spmd
from tensor.hugging_face import batch, build, loss

STEPS = 3


def rows(inputs: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    """A data-parallel rank's rows of a batch."""
    return {name: value.chunk(parts)[part] for name, value in inputs.items()}


def full_batch(step: int) -> dict[str, torch.Tensor]:
    """Rows with equally many labels, so that the mean over ranks is the mean over the batch."""
    return {k: v for k, v in batch(seed=step, size=4).items() if k != "attention_mask"} | {
        "labels": batch(seed=step, size=4)["input_ids"]
    }


def train_whole(name: str, clip: float | None, **changes: Any) -> tuple[list[float], list[float], nn.Module]:
    """The reference: one process, the whole batch."""
    model = build(name, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(model, full_batch(step))
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses, norms, model


def assert_follows(name: str, mesh: sc.Mesh, stage: int, clip: float | None, tolerance: float, **options: Any) -> None:
    """A split and sharded model trains as the whole one. Collective."""
    changes = options.pop("changes", {})
    losses, norms, whole = train_whole(name, clip, **changes)
    model = build(name, seed=mesh.rank, **changes)  # all but the first rank's weights must not count
    if mesh.rank == 0:
        model = build(name, **changes)
    sc.tensor.parallelize(model, mesh["tp"], **options)
    sc.shard(model, mesh["dp"], stage=stage)
    optimizer = sc.optimizer("adamw", model, lr=1e-2, max_grad_norm=clip)
    optimizer.track_grad_norm = True
    for step in range(STEPS):
        value = loss(model, rows(full_batch(step), mesh.data_rank, mesh.data_world))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = sc.comm.sum_over_ranks(value.detach().clone(), mesh["dp"], "loss") / mesh.data_world
        assert abs(float(mean) - losses[step]) <= tolerance
        assert abs(optimizer.grad_norm - norms[step]) <= tolerance * norms[step]
    state = sc.state_dict(model)
    assert bool(state) == (mesh.rank == 0)
    for key, value in state.items():
        torch.testing.assert_close(value, whole.state_dict()[key], rtol=tolerance, atol=tolerance)
    assert_replicas_equal(model, mesh)


def assert_replicas_equal(model: nn.Module, mesh: sc.Mesh) -> None:
    """What several ranks of the tensor axis hold is the same to the last bit. Collective."""
    with sc.summon(model):
        for name, param in model.named_parameters():
            pieces, offset, mine = find_pieces(param), 0, {}
            for start, stop in pieces.ranges[mesh["tp"].rank]:
                part = param.narrow(pieces.dim, offset, stop - start) if param.dim() else param
                mine[f"{start}:{stop}"] = sc.comm.fingerprint(part)
                offset += stop - start
            for theirs in sc.comm.exchange(mine, mesh["tp"], "replicas"):
                assert all(theirs[key] == mine[key] for key in theirs.keys() & mine.keys()), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=4, timeout=110)
def test_stages_over_two_by_two_ranks(stage: int) -> None:
    mesh = sc.Mesh(tp=2)
    assert_follows("gpt2", mesh, stage, clip=0.5, tolerance=1e-9)


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("name", ["qwen3", pytest.param("bert", marks=pytest.mark.full)])
@spmd(world=4, timeout=110)
def test_grouped_heads_and_sequences(name: str, stage: int, sequence: bool) -> None:
    assert_follows(name, sc.Mesh(tp=2), stage, clip=None, tolerance=1e-6, sequence=sequence)


@pytest.mark.parametrize("name", ["llama", pytest.param("phi3", marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
@spmd(world=4, timeout=110)
def test_heads_that_ranks_share_count_once(name: str, stage: int) -> None:
    """Two key-value heads on four ranks: in the norm, and the same on both of their ranks afterwards."""
    assert_follows(name, sc.Mesh(tp=4), stage, clip=0.5, tolerance=1e-6)


class Ones(nn.Module):
    """A loss whose gradients are all 1: a split weight, a replicated bias, a vector that goes with the heads."""

    def __init__(self, axis: sc.mesh.Axis) -> None:
        super().__init__()
        self.linear = ColumnParallelLinear(4, 4, axis)
        self.whole = nn.Parameter(torch.randn(4))
        del self.linear.bias
        self.linear.bias = None
        self.heads = ColumnParallelLinear(1, 4, axis, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of everything."""
        return self.linear(x).sum() + self.whole.sum() + self.heads(x[:, :1]).sum()


@pytest.mark.parametrize("tp", [1, 2, 4])
@spmd(world=4)
def test_fault_f5_norm_counts_each_element_once(tp: int) -> None:
    mesh = sc.Mesh(tp=tp)
    model = Ones(mesh["tp"])
    sc.shard(model, mesh["dp"], stage=2)
    optimizer = sc.optimizer("sgd", model, lr=0.1, max_grad_norm=100.0)
    model(torch.ones(1, 4)).backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(24**0.5, rel=1e-6)


@pytest.mark.parametrize("shape", [{"tp": 1}, {"tp": 1, "replicate": 2}, {"tp": 2}])
@spmd(world=4)
def test_fault_f14_gradients_are_divided_by_the_data_ranks_only(shape: dict[str, int]) -> None:
    mesh = sc.Mesh(**shape)
    model = Ones(mesh["tp"])
    sc.shard(model, mesh["dp"], stage=2)
    optimizer = sc.optimizer("sgd", model, lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.ones(1, 4)).backward()
    optimizer.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(before[name] - param.detach(), torch.ones_like(param))


@spmd(world=4)
def test_fault_f15_tensor_peers_read_the_same_samples() -> None:
    mesh = sc.Mesh(tp=2)
    mine = list(sc.data.sampler(list(range(16)), mesh, shuffle=True, seed=0))
    assert sc.comm.exchange(mine, mesh["tp"], "samples") == [mine, mine]
    one, other = sc.comm.exchange(mine, mesh["dp"], "samples")
    assert sorted(one + other) == list(range(16))


@pytest.mark.parametrize("stage", [None, 0, 3])
@spmd(world=4)
def test_saving_and_loading_speak_of_whole_parameters(stage: int | None) -> None:
    """Fused and shared weights come back to the last bit, on another number of ranks, too."""
    mesh = sc.Mesh(tp=2)
    whole = build("qwen2", seed=1).state_dict()
    model = build("qwen2")
    sc.tensor.parallelize(model, mesh)
    if stage is not None:
        sc.shard(model, mesh, stage=stage)
    model.load_state_dict(whole)
    assert model.state_dict().keys() == whole.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name]), name
    if stage is not None:
        other = build("qwen2", seed=2).state_dict()
        sc.load_state_dict(model, other)
        for name, value in sc.state_dict(model, rank0_only=False).items():
            assert torch.equal(value, other[name]), name
    model = build("phi3")
    sc.tensor.parallelize(model, sc.Mesh(tp=4))
    whole = build("phi3", seed=1).state_dict()
    model.load_state_dict(whole)
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name]), name
    part = {name: value[:1] for name, value in whole.items()}
    with pytest.raises(RuntimeError, match="expected the whole parameter's"):
        model.load_state_dict(part)
