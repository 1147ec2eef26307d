"""Blocks with dropout and odd arguments, and the gradients of one pass through a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block with dropout, whose width is odd."""

    def __init__(self, width: int = 7, hidden: int = 13, rate: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.rate, self.training)
        return x + F.dropout(self.down(hidden), self.rate, self.training)


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = 3, rate: float = 0.5) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(rate=rate) for _ in range(num_blocks))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(build: Callable[[], nn.Module], seed: int = 3) -> Any:
    """The model that ``build`` makes under a fixed seed."""
    torch.manual_seed(seed)
    return build()


def results(call: Callable[..., Any], params: list[torch.Tensor], *shape: int, seed: int = 1) -> list[torch.Tensor]:
    """The output of ``call(x)``, all gradients, and the random numbers that come after forward and after backward."""
    torch.manual_seed(seed)
    x = torch.randn(*shape, requires_grad=True)
    output = call(x)
    after_forward = torch.rand(2)
    gradients = torch.autograd.grad(output.square().sum(), [x, *params], allow_unused=True)
    found = [torch.zeros(0) if gradient is None else gradient for gradient in gradients]
    return [output.detach(), *found, after_forward, torch.rand(2)]


def passes(model: nn.Module, *shape: int, seed: int = 1) -> list[torch.Tensor]:
    """:func:`results` of a whole model."""
    return results(model, list(model.parameters()), *(shape or (4, 5)), seed=seed)
