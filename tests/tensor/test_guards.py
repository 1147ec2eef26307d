"""What would go wrong silently is an error; what should work together does."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore.errors import RankMismatchError, StateError
from shardcore.protocols import find_pieces
from shardcore.testing import spmd
from tensor.hugging_face import batch, build, loss
from tensor.test_plans import make


@spmd(world=2)
def test_clipping_by_a_parts_norm_is_refused() -> None:
    model = sc.tensor.parallelize(make(), sc.Mesh(tp=2))
    model(batch()["input_ids"]).sum().backward()
    with pytest.raises(StateError, match="its norm would be that of the part"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    sc.shard(model, sc.Mesh(tp=2), stage=0)
    model(batch()["input_ids"]).sum().backward()
    with pytest.raises(StateError, match=r"its norm would be that of the part.*max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@spmd(world=2)
def test_copies_are_refused() -> None:
    model = sc.tensor.parallelize(make(), sc.Mesh(tp=2))
    with pytest.raises(StateError, match="a tensor-parallel model cannot be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(StateError, match="a layer that is split over it, cannot be copied or pickled"):
        copy.deepcopy(model.blocks[0])
    with pytest.raises(StateError, match="a tensor-parallel model cannot be copied or pickled"):
        torch.save(model, io.BytesIO())


@spmd(world=2)
def test_fault_f15_peers_that_read_different_data_are_told() -> None:
    mesh = sc.Mesh(tp=2)
    model = sc.tensor.parallelize(make(), mesh)
    with pytest.raises(RankMismatchError, match=r"the first call of a model that is split over 'tp'.*argument 0="):
        model(batch(seed=mesh.rank)["input_ids"])
    model = sc.tensor.parallelize(build("gpt2", dropout=True), mesh)
    torch.manual_seed(mesh.rank)
    with pytest.raises(RankMismatchError, match="the stream of random numbers"):
        model(**batch())


@spmd(world=2)
def test_recomputation_and_accumulation() -> None:
    """Checkpointed blocks, two backwards before a step."""
    whole, split = make(), make()
    sc.tensor.parallelize(split, sc.Mesh(tp=2))
    for model in (whole, split):
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        for seed in range(2):
            model(batch(seed)["input_ids"]).pow(2).sum().backward()
    found = dict(split.named_parameters())
    for name, param in whole.named_parameters():
        expected = find_pieces(found[name]).local(param.grad)
        torch.testing.assert_close(found[name].grad, expected, rtol=1e-10, atol=1e-9)


@spmd(world=2)
def test_frozen_weights_take_no_gradient() -> None:
    whole, split = make(), make()
    for model in (whole, split):
        model.requires_grad_(False)
        model.blocks[0].attention.q_proj.requires_grad_(True)
        model.blocks[1].norm2.requires_grad_(True)
    sc.tensor.parallelize(split, sc.Mesh(tp=2))
    for model in (whole, split):
        model(batch()["input_ids"]).pow(2).sum().backward()
    found = dict(split.named_parameters())
    for name, param in whole.named_parameters():
        assert (found[name].grad is None) == (param.grad is None)
        if param.grad is not None:
            expected = find_pieces(found[name]).local(param.grad)
            torch.testing.assert_close(found[name].grad, expected, rtol=1e-10, atol=1e-9)


@spmd(world=2)
def test_weights_that_are_freed_later_sum_their_gradients() -> None:
    """Norms in a split sequence: frozen when the model was split, trained afterwards."""
    whole, split = make(), make()
    for model in (whole, split):
        model.blocks[0].norm1.requires_grad_(False)
    sc.tensor.parallelize(split, sc.Mesh(tp=2), sequence=True)
    assert not split.blocks[0].norm1.weight.requires_grad
    for model in (whole, split):
        model.blocks[0].norm1.requires_grad_(True)
        model(batch()["input_ids"]).pow(2).sum().backward()
    expected = whole.blocks[0].norm1.weight.grad
    torch.testing.assert_close(split.blocks[0].norm1.weight.grad, expected, rtol=1e-10, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's look at its inputs
@spmd(world=2, timeout=110)
def test_compiled_blocks() -> None:
    whole, split = make(), make()
    sc.tensor.parallelize(split, sc.Mesh(tp=2))
    for block in split.blocks:
        block.compile(backend="aot_eager")
    for model in (whole, split):
        model(batch()["input_ids"]).pow(2).sum().backward()
    found = dict(split.named_parameters())
    for name, param in whole.named_parameters():
        expected = find_pieces(found[name]).local(param.grad)
        torch.testing.assert_close(found[name].grad, expected, rtol=1e-10, atol=1e-9)


@spmd(world=2, timeout=110)
def test_sixteen_bits_over_both_axes() -> None:
    """bf16 parameters with fp32 masters, sharded at stage 3 beside the split."""
    mesh = sc.Mesh(tp=2)
    model, whole = build("llama").float(), build("llama").float()
    sc.tensor.parallelize(model, mesh)
    sc.shard(model, mesh, stage=3, precision="bf16")
    optimizer = sc.optimizer("adamw", model, lr=1e-2, max_grad_norm=1.0)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(3):
        value, expected = loss(model, batch(step)), loss(whole, batch(step))
        assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=0.05)
        value.backward()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        assert optimizer.grad_norm == pytest.approx(float(norm), rel=0.1)


@spmd(world=2)
def test_models_built_in_pieces() -> None:
    """Under ``sharded_init`` parameters are pieces already; uses of them see the whole."""
    mesh = sc.Mesh(tp=2)
    torch.manual_seed(0)
    with sc.sharded_init(mesh):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    sc.tensor.parallelize(model, mesh, {"0": "colwise", "2": "rowwise"})
    sc.shard(model, mesh, stage=3)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), whole(x))


@pytest.mark.parametrize(("partition", "sequence"), [(False, False), (True, False), (False, True)])
@spmd(world=2, timeout=110)
def test_recomputed_blocks_with_dropout(partition: bool, sequence: bool) -> None:
    """With and without recomputation, to the last bit; inputs divided over the ranks, or parts of the sequence."""
    mesh = sc.Mesh(tp=2)
    grads = []
    for wraps in (False, True):
        model = sc.tensor.parallelize(build("gpt2", dropout=True), mesh, sequence=sequence)
        if wraps:
            sc.activation.wrap(model, partition=partition)
        torch.manual_seed(7)
        loss(model, batch()).backward()
        grads.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
