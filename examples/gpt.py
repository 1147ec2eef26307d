"""A small GPT over bytes, in plain torch: nothing in it knows that it will be sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a model; ``context`` is the longest sequence it is trained on."""

    dim: int
    num_layers: int
    num_heads: int
    context: int
    vocab: int = 256


PRESETS = {
    "small": GPTConfig(dim=128, num_layers=4, num_heads=2, context=128),  # learns on two CPU cores in two minutes
    "25m": GPTConfig(dim=512, num_layers=8, num_heads=8, context=256),
    "124m": GPTConfig(dim=768, num_layers=12, num_heads=12, context=1024),
    "350m": GPTConfig(dim=1024, num_layers=24, num_heads=16, context=1024),
    "1.5b": GPTConfig(dim=1600, num_layers=48, num_heads=25, context=1024),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by an angle that grows with the position (rotary embedding, Su et al. 2021).

    Args:
        x: [batch, heads, time, head_dim].
        cos, sin: [time, head_dim / 2].
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim, bias=False)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x``: [batch, time, dim] -> the same shape."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, time, head_dim]
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.relu(self.mlp_in(self.mlp_norm(x))).square())


class GPT(nn.Module):
    """Token ids to logits over the next token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        head_dim = config.dim // config.num_heads
        speeds = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(config.context), speeds)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: int64 [batch, time] -> logits [batch, time, vocab]."""
        x = self.embedding(tokens)
        time = tokens.size(1)
        cos, sin = self.cos[:time].to(x.dtype), self.sin[:time].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def _initialize(self) -> None:
        """Normal weights; those that add to the residual stream shrink with depth, so its variance does not grow."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = 1 / math.sqrt(2 * self.config.num_layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
