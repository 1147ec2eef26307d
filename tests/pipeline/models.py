"""Small models as lists of layers, with what pipelines get wrong elsewhere, and their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardcore.pipeline import LayerSpec, TiedLayerSpec, pop, stash

VOCABULARY, WIDTH = 11, 8


class Embed(nn.Module):
    """Token ids to a dict of hidden states and what blocks need besides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        """Hidden states, a mask, and a count that is no tensor."""
        return {"x": F.embedding(ids, self.weight), "mask": ids != 0, "depth": 0}


class Block(nn.Module):
    """Attention-free block over a dict."""

    def __init__(self, dropout: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        if frozen:
            self.up.requires_grad_(False)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        """The same dict, one deeper."""
        x = value["x"]
        y = self.down(self.drop(F.gelu(self.up(self.norm(x))))) * value["mask"].unsqueeze(-1)
        return {"x": x + y, "mask": value["mask"], "depth": value["depth"] + 1}


class Stash(nn.Module):
    """Sets the hidden states aside."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        """The value, with half of it beside."""
        stash("early", self.lin(value["x"]))
        return value


class Pop(nn.Module):
    """Adds what was set aside."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        """The sum of both."""
        return {**value, "x": value["x"] + self.lin(pop("early"))}


def head(embed: Embed, value: dict[str, Any]) -> torch.Tensor:
    """Logits by the embedding's own weight."""
    return value["x"] @ embed.weight.t() / value["depth"]


def tied(num_blocks: int = 6, dropout: float = 0.0) -> list[LayerSpec]:
    """Embedding and head share a weight; values between stages are dicts; one block is half frozen."""
    blocks = [LayerSpec(Block, dropout, frozen=i == 1) for i in range(num_blocks)]
    return [TiedLayerSpec("embed", Embed), *blocks, TiedLayerSpec("embed", Embed, forward_fn=head)]


def skipping() -> list[LayerSpec]:
    """The first block's input reaches the last one by itself."""
    blocks = [LayerSpec(Block) for _ in range(5)]
    return [
        TiedLayerSpec("embed", Embed),
        LayerSpec(Stash),
        *blocks,
        LayerSpec(Pop),
        TiedLayerSpec("embed", Embed, forward_fn=head),
    ]


def dropping() -> list[LayerSpec]:
    """With dropout in every block."""
    return tied(dropout=0.5)


MODELS: dict[str, Callable[[], list[LayerSpec]]] = {"tied": tied, "skipping": skipping, "dropping": dropping}


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Data:
    """Micro-batches by their number in the global batch; sizes and lengths cycle."""

    sizes: tuple[int, ...] = (2,)
    lengths: tuple[int, ...] = (5,)
    seed: int = 0

    def batch(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, labels)."""
        draw = torch.Generator().manual_seed(self.seed * 7919 + step * 101 + index)
        shape = (self.sizes[index % len(self.sizes)], self.lengths[index % len(self.lengths)])
        ids = torch.randint(0, VOCABULARY, shape, generator=draw)
        return ids, torch.randint(0, VOCABULARY, shape, generator=draw)

    def of_rank(self, rank: int, world: int, m: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What one data-parallel rank reads over several steps."""
        for step in range(steps):
            for i in range(m):
                yield self.batch(step, i * world + rank)
