"""Small models with the traps that sharding must survive, and their data by formula.

Each case builds the same model on every rank, gives a global batch for (step, micro-batch), and turns rows of it into a
loss that is a mean over rows, so that a rank's rows and the single process's whole batch have one meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 12
"""Rows of a global batch: divisible by 1, 2, 3 and 4 ranks."""


class Block(nn.Module):
    """A residual block of odd sizes: hidden 13 inside a width of 7."""

    def __init__(self, width: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Odd sizes, a parameter of one element and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain + self.nothing.sum()


class Tied(nn.Module):
    """Token embedding tied to the output head, in two units; a block applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11, bias=True)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in (0, 1, 0):
            x = self.blocks[i](x)
        return self.head(x).mean(1)


class Frozen(Perceptron):
    """The first block, and all but one bias of the last, take no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.blocks[2].up.bias.requires_grad_(True)


class Unused(Perceptron):
    """A block and a single parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Block()
        self.lonely = nn.Parameter(torch.full((5,), 2.0))


class MixedDtype(nn.Module):
    """fp32 and fp64 parameters side by side in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixedLayer() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MixedLayer(nn.Module):
    """A base weight in fp32 and an adapter in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.down = nn.Linear(6, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, 6, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype))


@dataclass
class Packet:
    """What nested blocks hand on."""

    state: torch.Tensor
    extra: dict[str, Any]


class NestedBlock(nn.Module):
    """Takes and returns a dataclass with a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, packet: Packet) -> Packet:
        first = torch.tanh(self.a(packet.state))
        second = self.b(first)
        return Packet(
            first + packet.state, {"pair": (second, None), "tag": "x", "last": packet.extra.get("pair", (0,))[0]}
        )


class Recorder(nn.Module):
    """Has parameters, and returns None: its loss goes elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 1)
        self.heard: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> None:
        self.heard = self.scale(x).square()


class Nested(nn.Module):
    """Nested outputs, and modules that return None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(3))
        self.recorders = nn.ModuleList(Recorder() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        packet = Packet(x, {})
        heard = x.new_zeros(())
        for block in self.blocks:
            packet = block(packet)
        for recorder in self.recorders:
            assert recorder(packet.state) is None
            heard = heard + recorder.heard.mean(-1)
        out = self.head(packet.state + packet.extra["pair"][0])
        return {"out": out + heard.unsqueeze(-1) * torch.tensor([0.1, 0.0, -0.1], dtype=out.dtype)}


class Conv(nn.Module):
    """Convolutions, a group norm, and an odd number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(1, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu_(layer(x)) + x  # in place on a unit's output
        return self.head(self.norm(x).mean((2, 3)))


class Attention(nn.Module):
    """Self-attention by nn.MultiheadAttention, which reads its children's weights without calling them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class TinyGPT(nn.Module):
    """Tied embeddings, positions, three attention blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 8)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList(Attention(8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def float_rows(seed: int, *shape: int) -> torch.Tensor:
    """[ROWS, *shape] standard normal values of this seed."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def token_rows(seed: int, length: int, vocabulary: int) -> torch.Tensor:
    """[ROWS, length] token ids of this seed."""
    return torch.randint(vocabulary, (ROWS, length), generator=torch.Generator().manual_seed(seed))


def _classify(model: nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    out = model(rows)
    if isinstance(out, dict):
        out = out["out"]
    return F.cross_entropy(out.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its data."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    """Global batch of a seed."""
    num_classes: int
    token_targets: bool = False
    """One target per token instead of one per row."""

    def model(self) -> nn.Module:
        """A fresh model, the same each time."""
        torch.manual_seed(7)
        return self.build()

    def batch(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of one micro-batch, all ranks' rows."""
        seed = 1000 * step + micro
        rows = self.inputs(seed)
        shape = rows.shape[:2] if self.token_targets else rows.shape[:1]
        targets = torch.randint(self.num_classes, shape, generator=torch.Generator().manual_seed(seed + 1))
        return rows, targets

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The mean loss of these rows."""
        return _classify(model, *batch)


ZOO: dict[str, Case] = {
    "odd": Case(build=Perceptron, inputs=lambda seed: float_rows(seed, 7), num_classes=3),
    "tied": Case(build=Tied, inputs=lambda seed: token_rows(seed, 4, 11), num_classes=11),
    "frozen": Case(build=Frozen, inputs=lambda seed: float_rows(seed, 7), num_classes=3),
    "unused": Case(build=Unused, inputs=lambda seed: float_rows(seed, 7), num_classes=3),
    "mixed": Case(build=MixedDtype, inputs=lambda seed: float_rows(seed, 6), num_classes=3),
    "nested": Case(build=Nested, inputs=lambda seed: float_rows(seed, 6), num_classes=3),
    "conv": Case(build=Conv, inputs=lambda seed: float_rows(seed, 3, 5, 5), num_classes=3),
    "gpt": Case(build=TinyGPT, inputs=lambda seed: token_rows(seed, 5, 17), num_classes=17, token_targets=True),
}


def rows_of(batch: tuple[torch.Tensor, ...], rank: int, world: int) -> tuple[torch.Tensor, ...]:
    """This rank's rows of a global batch."""
    return tuple(tensor.chunk(world)[rank] for tensor in batch)


class Vector(nn.Module):
    """``(weight * x).sum(-1)``: the gradient of the weight is the mean of x over rows, chosen at will."""

    def __init__(self, numel: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum(-1)


def step_with_gradient(
    model: nn.Module, optimizer: torch.optim.Optimizer, grad: list[float], accumulation: int = 1
) -> None:
    """One update in which the mean gradient over micro-batches is ``grad``."""
    for _ in range(accumulation):
        (model(torch.tensor([grad])).mean() / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()
