"""Tensor parallelism under every ZeRO stage: the training of one process on the whole batch, and its gradient norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.tensor import ColumnParallelLinear
from shardcore.testing import spmd
from tensor.following import assert_follows
from tensor.hugging_face import batch, build, loss


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
def test_data_ranks_may_read_batches_of_other_shapes() -> None:
    mesh = sc.Mesh(tp=2)
    model = build("gpt2")
    sc.tensor.parallelize(model, mesh)
    sc.shard(model, mesh, stage=2)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    for step in range(2):
        loss(model, batch(seed=step, length=6 + 2 * mesh.data_rank)).backward()
        optimizer.step()


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
