"""The training of one process on the whole batch, and a split and sharded model that must follow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardcore as sc
from shardcore.protocols import find_pieces
from tensor.hugging_face import batch, build, loss

STEPS = 3


def rows(inputs: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    """A data-parallel rank's rows of a batch."""
    return {name: value.chunk(parts)[part] for name, value in inputs.items()}


def full_batch(step: int) -> dict[str, torch.Tensor]:
    """Rows with equally many labels, so that the mean over ranks is the mean over the batch."""
    return {k: v for k, v in batch(seed=step, size=4).items() if k != "attention_mask"} | {
        "labels": batch(seed=step, size=4)["input_ids"]
    }


def train_whole(name: str, clip: float | None, **changes: Any) -> tuple[list[float], list[float], nn.Module]:
    """The reference: one process, the whole batch."""
    model = build(name, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        value = loss(model, full_batch(step))
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses, norms, model


def assert_follows(name: str, mesh: sc.Mesh, stage: int, clip: float | None, tolerance: float, **options: Any) -> None:
    """A split and sharded model trains as the whole one. Collective.

    Args:
        options: of ``parallelize``; ``changes`` of the model's configuration; ``recompute`` its blocks.
    """
    changes, recompute = options.pop("changes", {}), options.pop("recompute", False)
    losses, norms, whole = train_whole(name, clip, **changes)
    model = build(name, seed=mesh.rank, **changes)  # all but the first rank's weights must not count
    if mesh.rank == 0:
        model = build(name, **changes)
    sc.tensor.parallelize(model, mesh["tp"], **options)
    if recompute:
        sc.activation.wrap(model)
    sc.shard(model, mesh, stage=stage)
    optimizer = sc.optimizer("adamw", model, lr=1e-2, max_grad_norm=clip)
    optimizer.track_grad_norm = True
    for step in range(STEPS):
        value = loss(model, rows(full_batch(step), mesh.data_rank, mesh.data_world))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = sc.comm.sum_over_ranks(value.detach().clone(), mesh["dp"], "loss") / mesh.data_world
        assert abs(float(mean) - losses[step]) <= tolerance
        assert abs(optimizer.grad_norm - norms[step]) <= tolerance * norms[step]
    state = sc.state_dict(model)
    assert bool(state) == (mesh.rank == 0)
    for key, value in state.items():
        torch.testing.assert_close(value, whole.state_dict()[key], rtol=tolerance, atol=tolerance)
    assert_replicas_equal(model, mesh)


def assert_replicas_equal(model: nn.Module, mesh: sc.Mesh) -> None:
    """What several ranks of the tensor axis hold is the same to the last bit. Collective."""
    with sc.summon(model):
        for name, param in model.named_parameters():
            pieces, offset, mine = find_pieces(param), 0, {}
            for start, stop in pieces.ranges[mesh["tp"].rank]:
                part = param.narrow(pieces.dim, offset, stop - start) if param.dim() else param
                mine[f"{start}:{stop}"] = sc.comm.fingerprint(part)
                offset += stop - start
            for theirs in sc.comm.exchange(mine, mesh["tp"], "replicas"):
                assert all(theirs[key] == mine[key] for key in theirs.keys() & mine.keys()), name
