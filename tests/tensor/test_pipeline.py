"""A split model in stages: tensor, pipeline and data parallelism together."""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from shardcore.pipeline import Pipeline
from shardcore.protocols import find_pieces, part_of_whole
from shardcore.testing import spmd
from tensor.hugging_face import batch, build


def micro_batch(step: int, index: int) -> dict[str, torch.Tensor]:
    """Ids, their mask and labels."""
    return batch(seed=10 * step + index)


def reference(name: str, steps: int, m: int) -> tuple[list[float], list[float], torch.nn.Module]:
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
    ("name", "schedule", "stage", "sequence"),
    [
        ("llama", "1f1b", 1, False),
        ("gpt2", "zb-h1", 1, True),
        pytest.param("llama", "1f1b", 0, True, marks=pytest.mark.full),
        pytest.param("llama", "zb-h1", 2, False, marks=pytest.mark.full),
        pytest.param("gpt2", "1f1b", 2, False, marks=pytest.mark.full),
        pytest.param("qwen3", "zb-h1", 1, True, marks=pytest.mark.full),
    ],
)
@spmd(world=4, timeout=110)
def test_a_split_model_in_stages(name: str, schedule: str, stage: int, sequence: bool) -> None:
    """With a split sequence, stages hand on parts of it, and layer norms get the gradients of all parts."""
    mesh = sc.Mesh(pp=2, tp=2)
    losses, norms, whole = reference(name, steps=3, m=2)
    model = sc.tensor.parallelize(build(name), mesh, sequence=sequence)
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
    losses, norms, whole = reference("mixtral", steps=2, m=4)
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


@pytest.mark.full
@spmd(world=4, timeout=110)
def test_fault_f12_masks_on_parts_of_a_sequence_differ_in_every_stage() -> None:
    """Of the residual's dropout, which works on this rank's part of the sequence."""
    mesh = sc.Mesh(pp=2, tp=2)
    model = sc.tensor.parallelize(build("gpt2", dropout=True), mesh, sequence=True)
    masks: list[list[bool]] = []
    for block in model.transformer.h:
        block.mlp.dropout.register_forward_hook(lambda module, args, output: masks.append((output == 0).tolist()))
    pipe = Pipeline(model, mesh, num_microbatches=2)
    sc.shard(pipe, mesh, stage=1)
    pipe.train_batch(iter([micro_batch(0, i) for i in range(2)]))
    assert len(masks) == 2
    mine, theirs = sc.comm.exchange(masks, mesh["tp"], "masks")
    assert all(a != b for a, b in zip(mine, theirs, strict=True))
