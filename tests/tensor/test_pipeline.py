"""A split model in stages: tensor, pipeline and data parallelism together."""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from shardcore.errors import ConfigError
from shardcore.pipeline import Pipeline
from shardcore.protocols import find_pieces, part_of_whole
from shardcore.testing import spmd
from tensor.hugging_face import batch, build


def micro_batch(step: int, index: int) -> dict[str, torch.Tensor]:
    """Ids, their mask and labels."""
    return batch(seed=10 * step + index)


def reference(steps: int, m: int, name: str = "llama") -> tuple[list[float], list[float], torch.nn.Module]:
    """The plain loop."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for i in range(m):
            loss = model(**micro_batch(step, i), use_cache=False).loss / m
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, model


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [("1f1b", 1), pytest.param("1f1b", 0, marks=pytest.mark.full), pytest.param("zb-h1", 2, marks=pytest.mark.full)],
)
@spmd(world=4, timeout=110)
def test_a_split_llama_in_stages(schedule: str, stage: int) -> None:
    mesh = sc.Mesh(pp=2, tp=2)
    losses, norms, whole = reference(steps=3, m=2)
    model = sc.tensor.parallelize(build("llama"), mesh)
    pipe = Pipeline(model, mesh, schedule=schedule, num_microbatches=2)
    sc.shard(pipe, mesh, stage=stage)
    optimizer = sc.optimizer("sgd", pipe, lr=0.1, max_grad_norm=0.5)
    for step in range(3):
        loss = pipe.train_batch(iter([micro_batch(step, i) for i in range(2)]), optimizer)
        assert float(loss) == pytest.approx(losses[step], rel=1e-5)
        assert optimizer.grad_norm == pytest.approx(norms[step], rel=1e-5)
    with sc.summon(pipe):
        for name, param in pipe.named_parameters():
            expected = find_pieces(param).local(whole.get_parameter(name).detach())
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 2), pytest.param("zb-h1", 0, marks=pytest.mark.full)])
@spmd(world=4, timeout=110)
def test_experts_in_stages(schedule: str, stage: int) -> None:
    mesh = sc.Mesh(pp=2, ep=2)
    losses, norms, whole = reference(steps=2, m=4, name="mixtral")
    model = sc.tensor.parallelize(build("mixtral"), mesh)
    pipe = Pipeline(model, mesh, schedule=schedule, num_microbatches=2)
    sc.shard(pipe, mesh, stage=stage)
    optimizer = sc.optimizer("sgd", pipe, lr=0.1, max_grad_norm=0.5)
    for step in range(2):
        mine = [micro_batch(step, 2 * mesh.data_rank + i) for i in range(2)]
        loss = pipe.train_batch(iter(mine), optimizer)
        assert float(loss) == pytest.approx(losses[step], rel=1e-5)
        assert optimizer.grad_norm == pytest.approx(norms[step], rel=1e-5)
    with sc.summon(pipe):
        for name, param in pipe.named_parameters():
            expected = part_of_whole(param, whole.get_parameter(name).detach())
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-5)


@spmd(world=4)
def test_a_split_sequence_is_not_cut_into_stages() -> None:
    mesh = sc.Mesh(pp=2, tp=2)
    model = sc.tensor.parallelize(build("llama"), mesh, sequence=True)
    with pytest.raises(ConfigError, match="split along the sequence from its first block"):
        Pipeline(model, mesh)
