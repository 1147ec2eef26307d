"""Each parallel layer against its dense twin: outputs, input gradients and parameter gradients, in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from shardcore.errors import ConfigError
from shardcore.protocols import find_pieces
from shardcore.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, cross_entropy
from shardcore.testing import spmd

WORLDS = [1, 2, 4]


def tensor_axis(world: int) -> sc.mesh.Axis:
    """All ranks as one tensor axis."""
    return sc.Mesh(tp=world)["tp"]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums in double precision."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_gradients(parallel: nn.Module, dense: nn.Module) -> None:
    """Parameters are parts of the dense twin's, and so are their gradients."""
    found = dict(parallel.named_parameters())
    for name, param in dense.named_parameters():
        pieces = find_pieces(found[name])
        assert torch.equal(found[name], pieces.local(param.detach())), name
        assert found[name].grad is not None, name
        assert param.grad is not None, name
        close(found[name].grad, pieces.local(param.grad))
        assert torch.equal(pieces.assemble(found[name].detach(), name), param.detach())


def build(make: Any, seed: int = 3) -> Any:
    """A module in double precision, drawn from a seed."""
    torch.manual_seed(seed)
    return make().double()


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random doubles, the same on every rank, that take a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


class Mlp(nn.Module):
    """Two layers of a transformer's perceptron; 13 hidden features divide by no number of ranks."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 6] to [..., 10]."""
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("bias", [True, False])
@spmd(world=WORLDS)
def test_column_then_row(world: int, bias: bool) -> None:
    axis = tensor_axis(world)
    dense = build(lambda: Mlp(nn.Linear(6, 13, bias), nn.Linear(13, 10, bias)))
    parallel = build(lambda: Mlp(ColumnParallelLinear(6, 13, axis, bias), RowParallelLinear(13, 10, axis, bias)))
    x, y = values(2, 3, 6), values(2, 3, 6)
    out, expected = parallel(x), dense(y)
    close(out, expected)
    (out.sin() * values(2, 3, 10, seed=2).detach()).sum().backward()
    (expected.sin() * values(2, 3, 10, seed=2).detach()).sum().backward()
    close(x.grad, y.grad)
    assert_gradients(parallel, dense)


@spmd(world=WORLDS)
def test_whole_outputs_and_inputs(world: int) -> None:
    """A layer by itself, in the middle of replicated activations."""
    axis = tensor_axis(world)
    dense = build(lambda: Mlp(nn.Linear(6, 13), nn.Linear(13, 10)))
    parallel = build(
        lambda: Mlp(
            ColumnParallelLinear(6, 13, axis, gather_output=True), RowParallelLinear(13, 10, axis, split_input=True)
        )
    )
    x, y = values(4, 6), values(4, 6)
    out, expected = parallel(x), dense(y)
    close(out, expected)
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    close(x.grad, y.grad)
    assert_gradients(parallel, dense)


@spmd(world=[1, 2])
def test_sequence_between_layers(world: int) -> None:
    """Inputs and outputs are parts of the sequence; biases see a part of it, too."""
    axis = tensor_axis(world)
    dense = build(lambda: Mlp(nn.Linear(6, 13), nn.Linear(13, 10)))
    parallel = build(
        lambda: Mlp(ColumnParallelLinear(6, 13, axis, sequence_dim=1), RowParallelLinear(13, 10, axis, sequence_dim=1))
    )
    y = values(3, 4, 6)
    x = y.detach().chunk(world, 1)[axis.rank].clone().requires_grad_()
    out, expected = parallel(x), dense(y)
    close(out, expected.chunk(world, 1)[axis.rank])
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    close(x.grad, y.grad.chunk(world, 1)[axis.rank])
    assert_gradients(parallel, dense)


@pytest.mark.parametrize("padding", [None, 2, 10])
@spmd(world=WORLDS)
def test_embedding(world: int, padding: int | None) -> None:
    axis = tensor_axis(world)
    dense = build(lambda: nn.Embedding(11, 5, padding))
    parallel = build(lambda: VocabParallelEmbedding(11, 5, axis, padding))
    ids = torch.tensor([[0, 2, 10, 7], [2, 5, 5, 1]])
    out, expected = parallel(ids), dense(ids)
    assert torch.equal(out, expected)
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert_gradients(parallel, dense)
    with pytest.raises(IndexError, match="expected 0 to 10"):
        parallel(torch.tensor([11]))


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3}],
    ids=lambda options: "-".join(map(str, options)) or "plain",
)
@spmd(world=WORLDS)
def test_cross_entropy(world: int, options: dict[str, Any]) -> None:
    axis = tensor_axis(world)
    head = build(lambda: ColumnParallelLinear(6, 11, axis, bias=False))
    dense = build(lambda: nn.Linear(6, 11, bias=False))
    target = torch.tensor([[0, 10, -100, 3], [5, 3, 9, 2]])
    if "ignore_index" in options:
        target[0, 2] = 1
    x, y = values(2, 4, 6), values(2, 4, 6)
    loss = cross_entropy(head(x) * 30, target, axis, 11, **options)
    expected = F.cross_entropy((dense(y) * 30).view(-1, 11), target.view(-1), **options)
    close(loss.flatten(), expected.view(-1))
    loss.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    close(x.grad, y.grad)
    assert_gradients(head, dense)


@spmd(world=2)
def test_cross_entropy_in_sixteen_bits_sums_in_more() -> None:
    axis = tensor_axis(2)
    logits = values(64, 40).detach().bfloat16()
    mine = logits.chunk(2, 1)[axis.rank].requires_grad_()
    whole = logits.clone().requires_grad_()
    target = torch.arange(64) % 40
    loss = cross_entropy(mine, target, axis, 40)
    expected = F.cross_entropy(whole.float(), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2, 1)[axis.rank], rtol=1e-2, atol=1e-6)


@spmd(world=2)
def test_projections_of_one_input_sum_its_gradient_once() -> None:
    from shardcore.tensor.columns import Columns

    axis = tensor_axis(2)
    dense = build(lambda: nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 8, bias=False), nn.Linear(6, 4)]))
    layers = build(
        lambda: nn.ModuleList(ColumnParallelLinear(6, n, axis, bias=b) for n, b in ((4, True), (8, False), (4, True)))
    )
    shared = Columns(list(layers))
    for layer in layers:
        layer.columns = shared
    x, y = values(3, 6), values(3, 6)
    sc.comm.reset_traffic()
    sum(layer(x).pow(3).sum() for layer in layers).backward()
    assert sc.comm.traffic()["sum.calls"] == 1
    sum(layer(y).pow(3).sum() for layer in dense).backward()
    close(x.grad, y.grad)
    assert_gradients(layers, dense)
    # Layers that turn out to have inputs of their own go separate ways.
    for layer in (*layers, *dense):
        layer.zero_grad()
    inputs, others = [values(3, 6, seed=i) for i in range(3)], [values(3, 6, seed=i) for i in range(3)]
    for _ in range(2):
        sum(layer(z).pow(3).sum() for layer, z in zip(layers, inputs, strict=True)).backward()
        sum(layer(z).pow(3).sum() for layer, z in zip(dense, others, strict=True)).backward()
    for mine, theirs in zip(inputs, others, strict=True):
        close(mine.grad, theirs.grad)
    assert_gradients(layers, dense)


@spmd(world=2)
def test_mixed_precision_follows_autocast() -> None:
    axis = tensor_axis(2)
    torch.manual_seed(0)
    parallel = Mlp(ColumnParallelLinear(6, 12, axis), RowParallelLinear(12, 10, axis))
    torch.manual_seed(0)
    dense = Mlp(nn.Linear(6, 12), nn.Linear(12, 10))
    x, y = values(8, 6).detach().float().requires_grad_(), values(8, 6).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = parallel(x), dense(y)
    assert out.dtype == expected.dtype == torch.bfloat16
    out.float().pow(2).sum().backward()
    expected.float().pow(2).sum().backward()
    assert x.grad.dtype == parallel.up.weight.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, y.grad, rtol=0.05, atol=0.05)


@spmd(world=[2, 4])
def test_fault_f7_row_parallel_bias_is_added_once(world: int) -> None:
    layer = RowParallelLinear(8, 4, tensor_axis(world))
    nn.init.zeros_(layer.weight)
    nn.init.ones_(layer.bias)
    assert torch.equal(layer(torch.randn(3, 8 // world)), torch.ones(3, 4))


@spmd(world=WORLDS)
def test_fault_f1_parts_come_from_the_whole(world: int) -> None:
    axis = tensor_axis(world)
    torch.manual_seed(5)
    whole = nn.Linear(8, 8).weight.detach()
    for make in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(5)
        layer = make(8, 8, axis)
        pieces = find_pieces(layer.weight)
        assert torch.equal(pieces.assemble(layer.weight.detach(), "weight"), whole)
        parts = [sc.comm.fingerprint(layer.weight)]
        others = {each for parts in sc.comm.exchange(parts, axis, "parts") for each in parts}
        assert len(others) == world


@spmd(world=2)
def test_fault_f8_vocabulary_that_does_not_divide() -> None:
    """Nothing is padded, so nothing of a padding can take part in anything."""
    axis = tensor_axis(2)
    embedding = VocabParallelEmbedding(11, 5, axis)
    assert embedding.weight.shape == ((6, 5) if axis.rank == 0 else (5, 5))


@spmd(world=2)
def test_fault_f16_no_collective_of_the_default_group() -> None:
    mesh = sc.Mesh(tp=2, dp=1)
    assert mesh["tp"].group is not None
    x = torch.full((2, 4), float(mesh["tp"].rank))
    back = sc.tensor.gather_from_ranks(sc.tensor.split_to_ranks(x, mesh["tp"]), mesh["tp"])
    assert torch.equal(back, torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2))


@spmd(world=2)
def test_refusals() -> None:
    axis = tensor_axis(2)
    with pytest.raises(ConfigError, match="out_features of 1 cannot be split over the 2 ranks"):
        ColumnParallelLinear(4, 1, axis)
    with pytest.raises(ConfigError, match="this rank's part of 8"):
        RowParallelLinear(8, 4, axis)(torch.randn(2, 8))
    with pytest.raises(ConfigError, match="max_norm"):
        VocabParallelEmbedding.adopt(nn.Embedding(8, 4, max_norm=1.0), axis)
    with pytest.raises(ConfigError, match="its part of the vocabulary of 11"):
        cross_entropy(torch.randn(3, 11), torch.zeros(3, dtype=torch.int64), axis, 11)
    with pytest.raises(ConfigError, match="a target outside of 0 to 10"):
        cross_entropy(torch.randn(1, 6 - axis.rank), torch.tensor([11]), axis, 11)
    with pytest.raises(ConfigError, match="does not split over the 2 ranks"):
        sc.tensor.split_to_ranks(torch.randn(3, 5), axis, 1)
