"""Tiny models with the shapes that sharding gets wrong, each with random batches and a loss.

``build`` and ``batch`` depend on their seed alone. A batch is a dict of tensors whose dim 0 counts samples: the
key ``target`` is compared with the model's output, all others are its keyword arguments. ``loss`` is a mean over
samples, so the mean over ranks with equal slices is the loss of the global batch, and so are gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY = 256
SEQUENCE = 16


def names() -> list[str]:
    """Names of all models."""
    return list(_MODELS)


def build(name: str, seed: int = 0) -> nn.Module:
    """Model ``name`` with parameters drawn from ``seed``; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _entry(name).model()


def batch(name: str, seed: int, batch_size: int) -> Batch:
    """A random batch of ``batch_size`` samples for model ``name``."""
    return _entry(name).batch(torch.Generator().manual_seed(seed), batch_size)


def loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean loss (float32 scalar) of ``model`` on ``batch``: cross entropy against integer targets, else mean square.

    An output that nests several tensors is compared tensor by tensor with the same target, and the losses added.
    """
    inputs = {key: value for key, value in batch.items() if key != "target"}
    losses = [_criterion(output, batch["target"]) for output in _tensors(model(**inputs))]
    return torch.stack(losses).sum()


def rank_slice(batch: Batch, rank: int, world: int) -> Batch:
    """The samples of ``rank`` if ``world`` ranks share the batch in equal, consecutive slices."""
    found: Batch = {}
    for key, value in batch.items():
        if len(value) % world:
            raise ValueError(f"{len(value)} samples do not split into {world} equal slices")
        found[key] = value.chunk(world)[rank]
    return found


def _criterion(output: Tensor, target: Tensor) -> Tensor:
    output = output.float()
    if target.is_floating_point():
        return F.mse_loss(output, target.float())
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))


# ------------------------------------------------------------------------------------------------------------ models


class Mlp(nn.Sequential):
    """Perceptron 6-10-3."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) to (batch, 3)."""
        for layer in self:
            x = layer(x)
        return x


class Block(nn.Module):
    """Transformer block: causal attention and a perceptron, each behind a norm and around a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same."""
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class TinyGpt(nn.Module):
    """Byte-level GPT whose head is the token embedding."""

    def __init__(self, num_blocks: int = 2, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(0.02 * torch.randn(SEQUENCE, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, sequence), int64, to logits (batch, sequence, vocabulary)."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Parameters of 0, 1, 3, 7, 11 and 13 elements, one without dims, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.randn(1))
        self.three = nn.Parameter(torch.randn(3))
        self.seven = nn.Parameter(torch.randn(7))
        self.eleven = nn.Parameter(torch.randn(11))
        self.thirteen = nn.Parameter(torch.randn(13))
        self.transposed = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) to (batch, 5)."""
        a = torch.tanh(x * self.seven).sum(-1, keepdim=True)
        b = torch.tanh(a * self.eleven + self.scalar).mean(-1, keepdim=True)
        c = torch.tanh(b * self.thirteen).cumsum(-1)[:, -3:]
        return (c * self.three) @ self.transposed * self.one + self.empty.sum()


class Frozen(nn.Module):
    """A frozen layer, a layer whose bias alone is frozen, and a free one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 10)
        self.middle = nn.Linear(10, 10)
        self.head = nn.Linear(10, 3)
        self.embed.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) to (batch, 3)."""
        return self.head(torch.tanh(self.middle(torch.tanh(self.embed(x)))))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """A parameter that is never used, and a branch that is used where the batch opens its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.never = nn.Parameter(torch.randn(5))
        self.branch = nn.Linear(10, 10)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(batch, 6) and a gate (batch,), bool, to (batch, 3)."""
        x = torch.tanh(self.first(x))
        if bool(gate.any()):
            x = x + self.branch(x)
        return self.last(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight used by two layers, and a decoder that is the encoder transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Parameter(0.3 * torch.randn(10, 6))
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) to the same."""
        x = torch.tanh(F.linear(x, self.encoder))
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return F.linear(x, self.encoder.t())


class MixedDtype(nn.Module):
    """Layers in float32, bfloat16 and float64, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.in_float32 = nn.Linear(6, 10)
        self.in_bfloat16 = nn.Linear(10, 10, dtype=torch.bfloat16)
        self.in_float64 = nn.Linear(10, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6), float32, to (batch, 3), float64."""
        x = torch.tanh(self.in_float32(x)).to(self.in_bfloat16.weight.dtype)
        return self.in_float64(torch.tanh(self.in_bfloat16(x)).to(self.in_float64.weight.dtype))  # type: ignore[no-any-return]


class Conv(nn.Module):
    """Two convolutions with a group norm between, and an integer buffer that counts calls in training."""

    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 4, 3, stride=2)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 8, 8) to (batch, 4)."""
        if self.training:
            self.num_calls += 1
        x = torch.relu(self.norm(self.first(x)))
        return self.second(x).mean((2, 3))  # type: ignore[no-any-return]


@dataclass
class Heads:
    """Output of ``Nested``: tensors in a dict in a tuple, beside things that are no tensors."""

    named: tuple[dict[str, Tensor], str]
    extra: Tensor
    missing: None = None


class Split(nn.Module):
    """Two projections of its input, returned as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(10, 10)
        self.right = nn.Linear(10, 3)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """``{"hidden": (batch, 10)}`` to ``left`` (batch, 10) and ``right`` (batch, 3)."""
        return {"left": torch.tanh(self.left(x["hidden"])), "right": self.right(x["hidden"])}


class Nested(nn.Module):
    """Submodules that take and return dicts; the output is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.split = Split()
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Heads:
        """(batch, 6) to two outputs of (batch, 3)."""
        split = self.split({"hidden": torch.tanh(self.first(x))})
        return Heads(({"right": split["right"]}, "right"), self.last(split["left"]))


# ----------------------------------------------------------------------------------------------------------- batches


def _regression(*input_shape: int, target: int) -> Callable[[torch.Generator, int], Batch]:
    def make(generator: torch.Generator, batch_size: int) -> Batch:
        return {
            "x": torch.randn(batch_size, *input_shape, generator=generator),
            "target": torch.randn(batch_size, target, generator=generator),
        }

    return make


def _text(generator: torch.Generator, batch_size: int) -> Batch:
    text = torch.randint(VOCABULARY, (batch_size, SEQUENCE + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def _gated(generator: torch.Generator, batch_size: int) -> Batch:
    """One gate for the whole batch, open for about half of all seeds: ranks with slices of it agree."""
    gate = torch.rand((), generator=generator) < 0.5
    return _regression(6, target=3)(generator, batch_size) | {"gate": gate.expand(batch_size).clone()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]


_MODELS = {
    "mlp": _Entry(model=Mlp, batch=_regression(6, target=3)),
    "tiny_gpt": _Entry(model=TinyGpt, batch=_text),
    "odd": _Entry(model=Odd, batch=_regression(7, target=5)),
    "frozen": _Entry(model=Frozen, batch=_regression(6, target=3)),
    "unused": _Entry(model=Unused, batch=_gated),
    "tied": _Entry(model=Tied, batch=_regression(6, target=6)),
    "mixed_dtype": _Entry(model=MixedDtype, batch=_regression(6, target=3)),
    "conv": _Entry(model=Conv, batch=_regression(3, 8, 8, target=4)),
    "nested": _Entry(model=Nested, batch=_regression(6, target=3)),
}


def _entry(name: str) -> _Entry:
    if name not in _MODELS:
        raise ValueError(f"no model {name!r} in the zoo; there are {', '.join(_MODELS)}")
    return _MODELS[name]
