"""Sequences that ranks share: ring attention and the exchange of heads, against one process with whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from shardcore.errors import ConfigError, RankMismatchError, StateError
from shardcore.tensor import (
    context_parallel,
    heads_to_sequence,
    part_of_sequence,
    positions_of_part,
    ring,
    ring_attention,
    sequence_to_heads,
    ulysses_attention,
)
from shardcore.testing import run_spmd, spmd
from tensor.hugging_face import VOCABULARY, build

LENGTH = 16


def qkv(num_heads: int, num_kv_heads: int) -> list[torch.Tensor]:
    """Whole query, key, value and output gradient."""
    torch.manual_seed(0)
    shapes = [(2, num_heads, LENGTH, 4), *[(2, num_kv_heads, LENGTH, 4)] * 2, (2, num_heads, LENGTH, 4)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def check_attention(world: int, kind: str, heads: tuple[int, int], causal: bool, tile: int | None = None) -> None:
    """Output and gradients of this rank's part are those of the whole."""
    if tile is not None:
        ring._MAX_SCORES = tile
    mesh = sc.Mesh(cp=world)
    balanced = kind == "balanced ring"
    query, key, value, given = qkv(*heads)
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=0.3, enable_gqa=True)
    expected.backward(given)

    def part(x: torch.Tensor) -> torch.Tensor:
        return part_of_sequence(x, mesh, 2, balanced=balanced)

    mine = [part(x).clone().requires_grad_() for x in (query, key, value)]
    if kind == "ulysses":
        found = ulysses_attention(*mine, mesh, causal=causal, scale=0.3)
    else:
        found = ring_attention(*mine, mesh, causal=causal, scale=0.3, balanced=balanced)
    found.backward(part(given))
    torch.testing.assert_close(found, part(expected), rtol=1e-12, atol=1e-12)
    for x, y in zip(mine, whole, strict=True):
        torch.testing.assert_close(x.grad, part(y.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "balanced ring", "ulysses"])
def test_attention_is_that_of_the_whole_sequence(kind: str, world: int, heads: tuple[int, int], causal: bool) -> None:
    run_spmd(check_attention, world, world, kind, heads, causal)


@pytest.mark.parametrize("tile", [1, 100])
def test_scores_are_made_a_few_at_a_time(tile: int) -> None:
    run_spmd(check_attention, 2, 2, "balanced ring", (4, 2), True, tile)


@spmd(world=2)
def test_16_bit_sums_are_taken_in_fp32() -> None:
    mesh = sc.Mesh(cp=2)
    query, key, value, _ = (x.bfloat16() for x in qkv(4, 2))
    found = ring_attention(*(part_of_sequence(x, mesh, 2) for x in (query, key, value)), mesh, causal=True)
    wide = (x.double() for x in (query, key, value))
    exact = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), part_of_sequence(exact, mesh, 2), rtol=2**-8, atol=1e-6)


@spmd(world=2)
def test_exchanges_are_inverse_to_one_another() -> None:
    mesh = sc.Mesh(cp=2)
    x = part_of_sequence(torch.randn(2, 6, LENGTH, 3), mesh, 2)
    heads = sequence_to_heads(x, mesh)
    assert heads.shape == (2, 3, LENGTH, 3)
    assert torch.equal(heads_to_sequence(heads, mesh), x)


def tokens(step: int, size: int = 2) -> torch.Tensor:
    """Whole sequences of a step."""
    return torch.randint(3, VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(step))


def labels(step: int, size: int = 2) -> torch.Tensor:
    """Most of those on the last ranks do not count."""
    ids = tokens(step, size)
    ids[:, 9:15] = -100
    return ids


def whole_loss(model: Any, step: int, size: int = 2) -> torch.Tensor:
    """The model's own, in one process."""
    return model(input_ids=tokens(step, size), labels=labels(step, size)).loss


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("qwen3", marks=pytest.mark.full)])
@spmd(world=2, timeout=110)
def test_a_model_gives_its_own_loss_and_gradients(name: str, kind: str) -> None:
    """The library takes norms and the loss in single precision."""
    mesh = sc.Mesh(cp=2)
    whole, split = build(name), build(name)
    assert context_parallel(split, mesh, kind) is split
    found, expected = whole_loss(split, 0), whole_loss(whole, 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.backward()
    expected.backward()
    for (name, mine), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        mean = sc.comm.sum_over_ranks(mine.grad.clone(), mesh["cp"], name) / 2
        torch.testing.assert_close(mean, theirs.grad, rtol=1e-6, atol=1e-6 * float(theirs.grad.abs().max()))
    logits = split(input_ids=tokens(0), attention_mask=torch.ones(2, LENGTH)).logits
    expected = part_of_sequence(whole(tokens(0)).logits, mesh, balanced=kind == "ring")
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 2, 3])
@pytest.mark.parametrize(
    ("world", "sizes", "kind"),
    [(2, {"cp": 2}, "ulysses"), (4, {"cp": 2}, "ring"), (4, {"cp": 2, "tp": 2}, "ring"), (4, {"cp": 4}, "ring")],
)
def test_training_is_that_of_one_process(world: int, sizes: dict[str, int], kind: str, stage: int) -> None:
    run_spmd(check_training, world, sizes, kind, stage, timeout=110.0)


def check_training(sizes: dict[str, int], kind: str, stage: int) -> None:
    mesh = sc.Mesh(**sizes)
    whole = build("llama")
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    model = build("llama", seed=mesh.rank)  # all but the first rank's weights must not count
    sc.tensor.parallelize(model, mesh)
    context_parallel(model, mesh, kind)
    sc.shard(model, mesh, stage=stage)
    optimizer = sc.optimizer("adamw", model, lr=1e-2, max_grad_norm=0.5)
    optimizer.track_grad_norm = True
    for step in range(3):
        expected = whole_loss(whole, step, 4)
        expected.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
        reference.step()
        reference.zero_grad()
        rows = slice(4 // mesh.data_world * mesh.data_rank, 4 // mesh.data_world * (mesh.data_rank + 1))
        loss = model(input_ids=tokens(step, 4)[rows], labels=labels(step, 4)[rows]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = sc.comm.sum_over_ranks(loss.detach().clone(), mesh["dp"], "loss") / mesh.data_world
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-6, atol=1e-6)
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
    state = sc.state_dict(model)
    assert bool(state) == (mesh.rank == 0)
    for name, value in state.items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["ring", pytest.param("ulysses", marks=pytest.mark.full)])
@spmd(world=2, timeout=110)
def test_recomputed_blocks_go_around_again(kind: str) -> None:
    mesh = sc.Mesh(cp=2)
    whole, model = build("llama"), context_parallel(build("llama"), mesh, kind)
    sc.activation.wrap(model)
    sc.shard(model, mesh, stage=3)
    optimizer = sc.optimizer("sgd", model, lr=0.1)
    optimizer.track_grad_norm = True
    whole_loss(whole, 0).backward()
    whole_loss(model, 0).backward()
    optimizer.step()
    norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), float("inf")))
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)


@spmd(world=4, timeout=110)
def test_a_checkpoint_loads_without_the_axis(tmp_path: Path) -> None:
    mesh = sc.Mesh(cp=2)
    model = context_parallel(build("llama"), mesh)
    sc.shard(model, mesh, stage=3)
    optimizer = sc.optimizer("adamw", model, lr=1e-2)
    whole_loss(model, mesh.data_rank).backward()
    optimizer.step()
    sc.checkpoint.save(tmp_path, model, optimizer, tag="one")
    other = build("llama", seed=1)
    sc.shard(other, sc.Mesh(), stage=1)
    found = sc.optimizer("adamw", other, lr=1e-2)
    sc.checkpoint.load(tmp_path, other, found)
    expected = sc.state_dict(model, rank0_only=False)
    for name, value in sc.state_dict(other, rank0_only=False).items():
        assert torch.equal(value, expected[name]), name


class Attention(nn.Module):
    """A model of one's own, which takes parts of sequences."""

    def __init__(self, mesh: sc.Mesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.project, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[batch, part of the sequence, 6] to the same."""
        x = x + positions.unsqueeze(-1).to(x.dtype).cos()
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if self.mesh is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = ring_attention(q, k, v, self.mesh, causal=True, balanced=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=4)
def test_a_model_of_ones_own_with_losses_per_token(stage: int) -> None:
    """Sums of losses over tokens that ranks hold unevenly, divided by their number on all ranks."""
    mesh = sc.Mesh(cp=2)
    torch.manual_seed(0)
    whole = Attention(None).double()
    torch.manual_seed(0)
    model = Attention(mesh).double()
    context_parallel(model, mesh, attention=None)
    sc.shard(model, mesh, stage=stage)
    optimizer = sc.optimizer("sgd", model, lr=1.0, normalize="tokens")
    x = torch.randn(2, LENGTH, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.4
    (whole(x, torch.arange(LENGTH)).square().mean(-1)[counts].mean()).backward()
    row = slice(mesh.data_rank, mesh.data_rank + 1)
    part, mine = (part_of_sequence(each[row], mesh, balanced=True) for each in (x, counts))
    positions = positions_of_part(LENGTH, mesh, balanced=True)
    model(part, positions).square().mean(-1)[mine].sum().backward()
    optimizer.count_tokens(int(mine.sum()))
    optimizer.step()
    with sc.summon(model):
        for found, param in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), (param - param.grad).detach(), rtol=1e-12, atol=1e-12)


@spmd(world=4)
def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
    mesh = sc.Mesh(cp=4)
    x = torch.zeros(1, 6, LENGTH, 4)
    with pytest.raises(ConfigError, match="does not split into 4 pieces for the 4 ranks of axis 'cp'"):
        part_of_sequence(torch.zeros(1, 18), mesh)
    with pytest.raises(ConfigError, match="does not split into 8 pieces"):
        part_of_sequence(torch.zeros(1, 20), mesh, balanced=True)
    with pytest.raises(ConfigError, match="6 heads and 6 key-value heads do not divide over the 4 ranks"):
        ulysses_attention(x, x, x, mesh)
    with pytest.raises(ConfigError, match="of which the key-value heads divide the query's"):
        ring_attention(x, x[:, :4], x[:, :4], mesh)
    with pytest.raises(ConfigError, match="a balanced part of 3 positions"):
        ring_attention(x[:, :, :3], x[:, :, :3], x[:, :, :3], mesh, balanced=True)
    with pytest.raises(ConfigError, match="expected 'ring', 'ulysses' or None"):
        context_parallel(build("llama"), mesh, "rings")
    with pytest.raises(ConfigError, match=r"has no attention that Hugging Face's interface replaces.*attention=None"):
        context_parallel(nn.Linear(4, 4), mesh)
    model = context_parallel(build("llama"), mesh)
    with pytest.raises(ConfigError, match="input_ids: dim 1 of shape"):
        model(input_ids=tokens(0)[:, :12])
    with pytest.raises(ConfigError, match="pad on the right, and leave the mask out"):
        model(input_ids=tokens(0), attention_mask=torch.arange(LENGTH).expand(2, LENGTH) > 0)
    with pytest.raises(ConfigError, match="not known how the ranks of a sequence share 'pixel_values'"):
        model(input_ids=tokens(0), pixel_values=torch.zeros(1))
    with pytest.raises(StateError, match="shares its sequences already"):
        context_parallel(model, mesh)
    with pytest.raises(ConfigError, match="give both the same mesh"):
        sc.shard(model, sc.Mesh(cp=2))
    model = context_parallel(build("gemma2"), mesh)
    with pytest.raises(ConfigError, match=r"with softcap.* does not work with cp=4"):
        model(input_ids=tokens(0))
    model = context_parallel(build("llama", dropout=True), mesh)
    with pytest.raises(ConfigError, match="with dropout does not work with cp=4"):
        model(input_ids=tokens(0))


@spmd(world=2)
def test_ranks_of_a_sequence_read_the_same_data() -> None:
    mesh = sc.Mesh(cp=2)
    model = context_parallel(build("llama"), mesh)
    with pytest.raises(RankMismatchError, match="whose ranks must read the same data"):
        model(input_ids=tokens(mesh.rank))
