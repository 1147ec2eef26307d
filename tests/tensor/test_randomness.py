"""Dropout in and between split blocks, and copies that stay equal while they are trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardcore as sc
from shardcore.protocols import find_pieces
from shardcore.testing import spmd
from tensor.hugging_face import batch, build, loss


class Dropping(nn.Module):
    """A perceptron with dropout on its hidden features, and on its output. Keeps what it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 64), nn.Linear(64, 8)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 8] to the same."""
        hidden = self.inside(torch.ones_like(self.fc1(x)))
        out = self.outside(torch.ones(4, 64) * self.fc2(hidden).sum().detach().abs().clamp(1, 1))
        self.masks += [hidden.detach() != 0, out.detach() != 0]
        return self.fc2(self.fc1(x) * hidden) * out[:, :8]


def masks_of(model: nn.Module) -> list[torch.Tensor]:
    """Those of the block, which forgets them."""
    block = model[0]
    found, block.masks = block.masks, []
    return found


@spmd(world=4)
def test_fault_f12_masks_differ_where_activations_do() -> None:
    mesh = sc.Mesh(tp=2)
    torch.manual_seed(100 * mesh.data_rank + mesh["tp"].rank)  # peers' own seeds must not count
    model = nn.Sequential(Dropping())
    sc.tensor.parallelize(model, mesh, {"fc1": "colwise", "fc2": "rowwise"})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    first, again = masks_of(model)[:2], []
    assert len(first) == 2
    model(x)
    again = masks_of(model)
    for inside, outside in (first, again):
        told = [sc.comm.fingerprint(inside), sc.comm.fingerprint(outside)]
        peers = sc.comm.exchange(told, mesh["tp"], "masks")
        assert peers[0][0] != peers[1][0]
        assert peers[0][1] == peers[1][1]
        data = sc.comm.exchange(told, mesh["dp"], "masks")
        assert data[0][0] != data[1][0]
        assert data[0][1] != data[1][1]
    assert not torch.equal(first[0], again[0])
    assert not torch.equal(first[1], again[1])


@spmd(world=2)
def test_fault_f12_recomputation_draws_the_same() -> None:
    mesh = sc.Mesh(tp=2)
    model = nn.Sequential(Dropping())
    sc.tensor.parallelize(model, mesh, {"fc1": "colwise", "fc2": "rowwise"})
    x = torch.randn(4, 8).requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    inside, outside, inside_again, outside_again = masks_of(model)
    assert torch.equal(inside, inside_again)
    assert torch.equal(outside, outside_again)


@spmd(world=2)
def test_a_failure_inside_returns_to_the_shared_stream() -> None:
    mesh = sc.Mesh(tp=2)
    model = nn.Sequential(Dropping())
    sc.tensor.parallelize(model, mesh, {"fc1": "colwise", "fc2": "rowwise"})

    def fail(*_: object) -> None:
        raise ValueError("told to")

    handle = model[0].inside.register_forward_hook(fail)
    with pytest.raises(ValueError, match="told to"):
        model(torch.randn(4, 8))
    handle.remove()
    states = sc.comm.exchange(sc.comm.fingerprint(torch.get_rng_state()), mesh["tp"], "streams")
    assert states[0] == states[1]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", pytest.param("bert", marks=pytest.mark.full)])
@spmd(world=2, timeout=110)
def test_copies_stay_equal_under_dropout(name: str, sequence: bool) -> None:
    train_and_compare(name, sequence, steps=4)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@spmd(world=2, timeout=800)
def test_copies_stay_equal_for_a_thousand_steps(name: str, sequence: bool) -> None:
    train_and_compare(name, sequence, steps=1000)


def train_and_compare(name: str, sequence: bool, steps: int) -> None:
    """Train with dropout; what every rank holds stays the same to the last bit, and so does the shared stream."""
    mesh = sc.Mesh(tp=2)
    model = build(name, seed=mesh.rank, dropout=True)
    sc.tensor.parallelize(model, mesh, sequence=sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss(model, batch(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    copies = {n: p for n, p in model.named_parameters() if find_pieces(p).is_whole}
    assert len(copies) > 4
    told = {name: sc.comm.fingerprint(param) for name, param in copies.items()}
    told["stream"] = sc.comm.fingerprint(torch.get_rng_state())
    for theirs in sc.comm.exchange(told, mesh["tp"], "copies"):
        assert theirs == told


class Normed(nn.Module):
    """Norms around a perceptron, with biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, 8] to the same."""
        return self.norm2(x + self.mlp(self.norm1(x)))


class Perceptron(nn.Module):
    """8-20-8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 8] to the same."""
        return self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, 8] to the same."""
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("sequence", [False, True])
@spmd(world=2)
def test_fault_f3_norms_follow_the_whole_model(sequence: bool) -> None:
    mesh = sc.Mesh(tp=2)
    torch.manual_seed(0)
    whole = Stack().double()
    torch.manual_seed(0)
    split = Stack().double()
    sc.tensor.parallelize(split, mesh, sequence=sequence)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (split, whole)]
    for step in range(10):
        x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((split, whole), optimizers, strict=True):
            model(x).pow(3).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = split.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
    norms = {n: sc.comm.fingerprint(p) for n, p in split.named_parameters() if "norm" in n or n.endswith("down.bias")}
    assert sc.comm.exchange(norms, mesh["tp"], "norms") == [norms, norms]
    if sequence:
        with pytest.raises(sc.errors.ConfigError, match="does not split over the 2 ranks"):
            split(torch.randn(2, 5, 8, dtype=torch.float64))
