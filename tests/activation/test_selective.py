"""The selective policy runs matrix products and fused attention once, and stays exact where their outputs are written
to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardcore as sc
from activation.blocks import results, seeded
from shardcore import comm
from shardcore._torch_private import DispatchMode
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise

CHEAP_AND_DEAR = ("addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu", "native_layer_norm", "gelu")


class CountCalls(DispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """A block with fused attention."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.25)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def recomputed(module: nn.Module, policy: str) -> Any:
    return sc.activation.wrap(nn.Sequential(module), units=[type(module)], policy=policy)


def params_of(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def test_only_what_is_cheap_runs_again() -> None:
    calls = {}
    for policy in ("full", "selective"):
        model = recomputed(seeded(Attention), policy)
        loss = model(torch.ones(2, 4, 8)).sum()
        with CountCalls() as counted:
            loss.backward()
        calls[policy] = counted.calls
    # Each of the 3 layers but the last is needed again: its output is an input of something; autograd's own backward
    # takes 2 products a layer, one of them for each weight.
    differences = {name: calls["full"][name] - calls["selective"][name] for name in CHEAP_AND_DEAR}
    assert differences == {
        "addmm": 2,
        "mm": 1,
        "_scaled_dot_product_flash_attention_for_cpu": 1,
        "native_layer_norm": 0,
        "gelu": 0,
    }
    assert calls["selective"]["native_layer_norm"] == 2
    assert calls["selective"]["gelu"] == 1


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_attention_to_the_bit(policy: str) -> None:
    plain = seeded(lambda: nn.Sequential(Attention()))
    model = recomputed(seeded(Attention), policy)
    assert_bitwise(results(model, params_of(model), 2, 4, 8), results(plain, params_of(plain), 2, 4, 8))


class WritesInPlace(nn.Module):
    """Operations in place on what a matrix product returned, directly and through a view."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=bias) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.elu(self.layers[0](x), inplace=True)
        x = self.layers[1](x)
        x.view(-1, 3).mul_(2.0)
        x = self.layers[2](x).sin()
        x = self.layers[3](x).transpose(0, 1)
        x += 1
        return self.layers[4](x.transpose(0, 1).tanh())


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 6)], ids=str)
def test_outputs_that_are_written_to_are_computed_again(policy: str, bias: bool, shape: tuple[int, ...]) -> None:
    """On three dims a layer without bias returns a view of its product that torch does not count as one."""

    def call(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: model(x * 1.0).mul_(3.0).exp()  # the block's own output is written to as well

    plain = seeded(lambda: nn.Sequential(WritesInPlace(bias)))
    model = recomputed(seeded(lambda: WritesInPlace(bias)), policy)
    assert_bitwise(results(call(model), params_of(model), *shape), results(call(plain), params_of(plain), *shape))


class ReturnsBoth(nn.Module):
    """Returns a product, and something that needs it in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y.sin()


def test_an_output_that_is_written_to_afterwards_is_computed_again() -> None:
    gradients = []
    for policy in ("full", "selective"):
        model = recomputed(seeded(ReturnsBoth), policy)
        y, sine = model(torch.ones(2, 3, 6))
        with torch.no_grad():
            y.zero_()
        sine.sum().backward()
        gradients.append(model[0].layer.weight.grad)
    assert_bitwise(gradients[1], gradients[0])


class SumsOverRanks(nn.Module):
    """A row-parallel layer, which sums its partial outputs over ranks in place."""

    def __init__(self, axis: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.layer(x)
        comm.all_reduce(partial.detach(), self.axis, "sum").wait()  # autograd sees no write; backward is the identity
        return partial.sin().square()


@spmd(world=2)
def test_a_sum_over_ranks_in_place_is_not_taken_twice() -> None:
    axis = sc.Mesh(tp=2, device="cpu")["tp"]
    plain = seeded(lambda: nn.Sequential(SumsOverRanks(axis)))
    for policy in ("full", "selective"):
        model = recomputed(seeded(lambda: SumsOverRanks(axis)), policy)
        assert_bitwise(results(model, params_of(model), 2, 6), results(plain, params_of(plain), 2, 6))


def test_two_backwards_through_one_graph() -> None:
    model = recomputed(seeded(Attention), "selective")
    x = torch.randn(2, 4, 8, requires_grad=True)
    loss = model(x).square().sum()
    once = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    assert_bitwise(list(torch.autograd.grad(loss, [x, *model.parameters()])), list(once))
