"""The engine's checkpoints have DeepSpeed's names and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore as sc
from engine.loops import WithLoss, batches, config
from shardcore.errors import CheckpointError, ConfigError, RankMismatchError
from shardcore.testing import spmd
from shardcore.testing.twin import assert_bitwise

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}}


def build(stage: int, **more: Any) -> Any:
    """An engine over the zoo's perceptron, with two micro-batches a step."""
    return sc.initialize(model=WithLoss("mlp"), config=config(stage, 2, **WARMUP, **more))[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for batch in batches("mlp", engine.mesh, step, 2):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("stages", [(0, 0), (2, 3), (3, 2), (1, 1)])
@spmd(world=2)
def test_an_engine_goes_on_where_it_was(stages: tuple[int, int], tmp_path: Path) -> None:
    engine = build(stages[0])
    train(engine, 0, 3)
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 4})
    assert (tmp_path / "latest").read_text() == "global_step3"
    straight = train(engine, 3, 6)
    other = build(stages[1])
    train(other, 7, 8)
    path, client_state = other.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step3")
    assert client_state == {"epoch": 4}
    assert (other.global_steps, other.global_samples, other.micro_steps) == (3, 48, 6)
    assert train(other, 3, 6) == straight
    assert other.get_lr() == engine.get_lr()
    assert_bitwise(sc.state_dict(other.module, rank0_only=False), sc.state_dict(engine.module, rank0_only=False))


@spmd(world=2)
def test_nothing_to_load_is_none_and_none(tmp_path: Path) -> None:
    engine = build(2)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_checkpoint(tmp_path, tag="missing")
    with pytest.raises(ConfigError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)


@spmd(world=2)
def test_parts_can_be_left_out(tmp_path: Path) -> None:
    engine = build(3)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag=17, save_latest=False)
    assert not (tmp_path / "latest").exists()
    weights = build(1)
    weights.load_checkpoint(tmp_path, tag=17, load_module_only=True)
    assert (weights.global_steps, weights.optimizer.num_steps) == (0, 0)
    assert_bitwise(sc.state_dict(weights.module, rank0_only=False), sc.state_dict(engine.module, rank0_only=False))
    fresh = build(2)
    fresh.load_checkpoint(tmp_path, tag="17", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert (fresh.global_steps, fresh.optimizer.num_steps, fresh.lr_scheduler.last_epoch) == (2, 0, 0)


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
@spmd(world=2)
def test_tags_that_differ(validation: str, tmp_path: Path) -> None:
    engine = build(1, checkpoint={"tag_validation": validation})
    tag = f"of-rank-{engine.global_rank}"
    if validation == "Fail":
        with pytest.raises(RankMismatchError, match="of-rank-0, of-rank-1"):
            engine.save_checkpoint(tmp_path, tag=tag)
        return
    engine.save_checkpoint(tmp_path, tag=tag)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "of-rank-0")


@pytest.mark.parametrize("drop_last", [False, True])
@spmd(world=2)
def test_the_position_in_the_data_is_kept(drop_last: bool, tmp_path: Path) -> None:
    """A loop as DeepSpeed's users write it saves in mid-epoch, and after an epoch; the rest of that and the next one
    come as they would have."""
    data = torch.utils.data.TensorDataset(torch.arange(37.0))
    settings = config(1, dataloader_drop_last=drop_last)
    engine, _, loader, _ = sc.initialize(model=WithLoss("mlp"), config=settings, training_data=data)
    seen, rest = [], {}
    for _ in range(3):
        for number, batch in enumerate(loader):
            seen.append(batch[0].tolist())
            if number == 2:
                engine.save_checkpoint(tmp_path, tag=f"at {len(seen)}")
        engine.save_checkpoint(tmp_path, tag=f"after {len(seen)}")
    for tag in ("at 3", f"after {len(seen) // 3}"):
        other, _, loader, _ = sc.initialize(model=WithLoss("mlp"), config=settings, training_data=data)
        other.load_checkpoint(tmp_path, tag=tag)
        rest[tag] = [batch[0].tolist() for _ in range(3) for batch in loader]
        start = int(tag.split()[1])
        assert rest[tag][: len(seen) - start] == seen[start:]
