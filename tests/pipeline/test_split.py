"""A split backward gives what autograd gives, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import shardcore as sc
from pipeline.models import tied
from shardcore.pipeline.split import WeightGradients
from shardcore.pipeline.split_rules import rule_of
from shardcore.testing.twin import assert_bitwise

FLOATS = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
MODULES = {
    "linear": (lambda: nn.Linear(8, 6), FLOATS),
    "linear without bias": (lambda: nn.Linear(8, 6, bias=False), FLOATS),
    "linear on a matrix": (lambda: nn.Linear(8, 6), FLOATS[0]),
    "conv1d of transformers": (lambda: Conv1D(6, 8), FLOATS),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=2), torch.randint(0, 9, (3, 5))),
    "layer norm": (lambda: nn.LayerNorm(8), FLOATS),
    "layer norm over two dims": (lambda: nn.LayerNorm((5, 8)), FLOATS),
    "layer norm without bias": (lambda: nn.LayerNorm(8, bias=False), FLOATS),
    "rms norm": (lambda: nn.RMSNorm(8), FLOATS),
    "conv 1-d": (lambda: nn.Conv1d(5, 4, 3, padding=1), FLOATS),
    "conv 2-d, groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), torch.randn(2, 4, 7, 7)),
}


def gradients(module: nn.Module, x: torch.Tensor, *, split: bool, twice: bool = False) -> list[torch.Tensor | None]:
    """Output, gradient of the input and gradients of the parameters, with a random gradient of the output."""
    x = x.clone().requires_grad_(x.is_floating_point())
    sink = WeightGradients(torch.device("cpu"))
    if split:
        sink.split([module])
        assert sink.num_whole == 0
    output = checkpoint(module, x, use_reentrant=False) if twice else module(x)
    with sink.collected() as closures:
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
    assert len(closures) == split
    if split:
        assert all(p.grad is None for p in module.parameters())
        assert x.grad is not None or not x.is_floating_point()
    for closure in closures:
        for param, grad in closure():
            param.grad = grad
    return [output.detach(), x.grad, *(param.grad for param in module.parameters())]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_split_is_the_module(name: str, frozen: bool) -> None:
    build, x = MODULES[name]
    runs = []
    for split in (False, True):
        torch.manual_seed(3)
        module = build()
        bias = getattr(module, "bias", None)
        if frozen and bias is not None:
            bias.requires_grad_(False)
        runs.append(gradients(module, x, split=split))
    assert_bitwise(runs[1], runs[0])


def test_a_recomputed_module_runs_twice_in_all() -> None:
    """Once forward, once in the backward; the weights' gradients recompute nothing."""
    calls = 0

    def count(module: nn.Module, args: object) -> None:
        nonlocal calls
        calls += 1

    runs = []
    for split in (False, True):
        torch.manual_seed(3)
        module = nn.Linear(8, 6)
        module.register_forward_pre_hook(count)
        runs.append(gradients(module, FLOATS, split=split, twice=True))
        assert calls == 2
        calls = 0
    assert_bitwise(runs[1], runs[0])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_module_whose_gradients_somebody_sees_is_left_to_autograd(sharded: bool, register: str) -> None:
    module: nn.Module = nn.Linear(8, 6)
    if sharded:
        module = sc.shard(module, stage=0)
    sink = WeightGradients(torch.device("cpu"))
    sink.split([module])
    seen: list[torch.Tensor] = []
    for num_split in (1, 0):
        output = module(FLOATS)
        with sink.collected() as closures:
            output.sum().backward()
        assert len(closures) == num_split
        assert len(seen) == (num_split == 0)
        getattr(module.bias, register)(seen.append)


def test_what_cannot_be_split_is_known() -> None:
    for module in (nn.Embedding(3, 2, max_norm=1.0), nn.Conv1d(1, 1, 3, padding="same"), nn.Bilinear(2, 2, 2)):
        assert rule_of(module) is None
    block = tied()[1].build()
    sink = WeightGradients(torch.device("cpu"))
    sink.split([block])
    assert sink.num_split == sum(p.numel() for p in block.parameters())
