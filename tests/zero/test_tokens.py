"""Means over the target tokens of a whole step, and several backwards with one reduction. Tests carry fault ids."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
COUNTS = {(0, 0): 1, (0, 1): 7, (1, 0): 4, (1, 1): 2}
"""(rank, micro-batch) -> target tokens."""
ALL_MASKED = {(0, 0): 0, (0, 1): 0, (1, 0): 4, (1, 1): 2}


class Tagger(nn.Module):
    """Three classes per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(tokens))


def data(step: int, rank: int, micro: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """8 tokens of which ``count`` have a target."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    labels = torch.randint(3, (8,), generator=generator)
    labels[count:] = -100
    return torch.randint(11, (8,), generator=generator), labels


def loss_of(model: nn.Module, step: int, rank: int, micro: int, count: int, reduction: str = "sum") -> torch.Tensor:
    tokens, labels = data(step, rank, micro, count)
    return F.cross_entropy(model(tokens).float(), labels, ignore_index=-100, reduction=reduction)


def alone(counts: dict[tuple[int, int], int], steps: int) -> dict[str, torch.Tensor]:
    """One process on the global batch: the mean over all of its tokens."""
    torch.manual_seed(2)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        pairs = [data(step, rank, micro, count) for (rank, micro), count in counts.items()]
        tokens, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        F.cross_entropy(model(tokens), labels, ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def compare(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in whole_parameters(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@all_stages
@pytest.mark.parametrize("counts", [COUNTS, ALL_MASKED], ids=["uneven", "masked"])
@spmd(world=2)
def test_n5_n12_a_token_weighted_step_is_that_of_the_global_batch(stage: int, counts: dict[Any, int]) -> None:
    rank = sc.Mesh().rank
    torch.manual_seed(2)
    model = sc.shard(Tagger(), stage=stage, precision=sc.Precision(loss_scale=16.0))
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.3, max_grad_norm=0.5, normalize="tokens")
    for step in range(3):
        for micro in range(2):
            loss_of(model, step, rank, micro, counts[rank, micro]).backward()
            count = counts[rank, micro]
            optimizer.count_tokens(torch.tensor(count) if micro else count)
        optimizer.step()
        optimizer.zero_grad()
    compare(model, alone(counts, 3))


@all_stages
@spmd(world=2)
def test_n5_the_engine_counts_tokens(stage: int) -> None:
    rank = sc.Mesh().rank
    torch.manual_seed(2)
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = sc.initialize(model=Tagger(), config=settings)
    assert optimizer is not None
    for step in range(3):
        for micro in range(2):
            count = COUNTS[rank, micro]
            engine.backward(loss_of(engine, step, rank, micro, count), num_tokens=count)
            engine.step()
    compare(engine.module, alone(COUNTS, 3))
    engine.backward(loss_of(engine, 3, rank, 0, 4), num_tokens=4)
    engine.step()
    with pytest.raises(StateError, match="all count their tokens"):
        engine.backward(loss_of(engine, 3, rank, 1, 4, "mean"))
    engine.reset_iteration()
    for micro in range(2):
        engine.backward(loss_of(engine, 3, rank, micro, 4, "mean"))
        engine.step()
    assert optimizer.normalize is None
    assert engine.was_step_applied()


@all_stages
@spmd(world=2)
def test_tokens_that_are_not_counted_are_an_error(stage: int) -> None:
    model = sc.shard(Tagger(), stage=stage)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.1, normalize="tokens")
    loss_of(model, 0, 0, 0, 3).backward()
    with pytest.raises(StateError, match="count_tokens"):
        optimizer.step()
    with pytest.raises(ConfigError, match="at least 0"):
        optimizer.count_tokens(-1)
    with pytest.raises(ConfigError, match="one number"):
        optimizer.count_tokens(torch.ones(2))
    with pytest.raises(ConfigError, match="'tokens'"):
        sc.optimizer(torch.optim.SGD, model, lr=0.1, normalize="words")  # type: ignore[arg-type]
    plain = sc.shard(Tagger(), stage=stage)
    with pytest.raises(StateError, match="normalize='tokens'"):
        sc.optimizer(torch.optim.SGD, plain, lr=0.1).count_tokens(3)


def num_reductions() -> int:
    return sum(count for name, count in sc.comm.traffic().items() if name in ("reduce.calls", "all-reduce.calls"))


@all_stages
@spmd(world=2)
def test_several_backwards_with_one_reduction(stage: int) -> None:
    rank = sc.Mesh().rank
    calls = {}
    results = {}
    for once in (False, True):
        torch.manual_seed(2)
        model = sc.shard(Tagger(), stage=stage)
        root: Any = find_root(model)
        optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.3)
        for step in range(3):
            sc.comm.reset_traffic()
            if once:
                with sc.zero.reduce_once(model):
                    for micro in range(3):
                        loss_of(model, step, rank, micro, 5).backward()
                    assert any(group.grads.has_local for group in root.groups)
                assert not any(group.grads.has_local for group in root.groups)
            else:
                for micro in range(3):
                    loss_of(model, step, rank, micro, 5).backward()
            calls[once] = num_reductions()
            optimizer.step()
            optimizer.zero_grad()
        results[once] = whole_parameters(model)
    for name, value in results[True].items():
        torch.testing.assert_close(value, results[False][name], rtol=1e-5, atol=1e-6)
    assert calls[True] == (0 if stage == 1 else calls[False] // 3) + (calls[False] if stage == 1 else 0) + 1


@all_stages
@spmd(world=2)
def test_the_engines_coalesced_reduction_is_one_step(stage: int) -> None:
    """Two backwards of a window of two in one block: the next step() updates with their mean."""
    rank = sc.Mesh().rank
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage},
    }
    results = []
    for coalesces in (False, True):
        torch.manual_seed(2)
        engine, _, _, _ = sc.initialize(model=Tagger(), config=settings)
        for step in range(2):
            if coalesces:
                with engine.coalesce_grad_reduction():
                    for micro in range(2):
                        engine.backward(loss_of(engine, step, rank, micro, 5))
                    with pytest.raises(StateError, match="coalesce_grad_reduction"):
                        engine.step()
                assert engine.is_gradient_accumulation_boundary()
                engine.step()
            else:
                for micro in range(2):
                    engine.backward(loss_of(engine, step, rank, micro, 5))
                    engine.step()
        assert engine.global_steps == 2
        assert not engine.is_gradient_accumulation_boundary()
        results.append(whole_parameters(engine.module))
    for name, value in results[1].items():
        torch.testing.assert_close(value, results[0][name], rtol=1e-5, atol=1e-6)


@spmd(world=2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_optimizer_of_a_model_counts_tokens_of_its_own_window(stage: int) -> None:
    """One steps at every backward, the other at every second; each forgets tokens with its own gradients."""
    mesh = sc.Mesh()
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    model = sc.shard(copy.deepcopy(alone), mesh, stage=stage)
    often, seldom = (sc.optimizer("sgd", list(model[i].parameters()), lr=1e-2, normalize="tokens") for i in (0, 1))
    plain = [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in alone]
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x[4 * mesh.rank :][:4]).square().sum().backward()
        alone(x).square().sum().backward()
        for optimizer in (often, seldom):
            optimizer.count_tokens(4)
        for i, optimizer in enumerate((often, seldom)):
            if i == 0 or step % 2 == 1:
                for param in alone[i].parameters():
                    param.grad /= 8 * (1 + i)
                plain[i].step()
                plain[i].zero_grad()
                optimizer.step()
                optimizer.zero_grad()
    compare(model, {name: param.detach() for name, param in alone.named_parameters()})
