"""``deepspeed.checkpointing`` and the section ``activation_checkpointing``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from activation.blocks import Stack, passes, seeded
from shardcore.deepspeed import checkpointing
from shardcore.errors import ConfigError, StateError
from shardcore.testing import run_spmd, spmd
from shardcore.testing.twin import assert_bitwise


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing configured yet."""
    monkeypatch.setattr(checkpointing, "_state", checkpointing._State())
    yield
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()


class Checkpointing(nn.Module):
    """A model that recomputes its blocks by DeepSpeed's call, as scripts do."""

    def __init__(self, model: nn.Module, *, is_on: bool = True) -> None:
        super().__init__()
        self.model = model
        self.is_on = is_on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model.embed(x)
        for block in self.model.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.is_on else block(x)
        return self.model.head(x)


@pytest.mark.parametrize(
    "section",
    [
        None,
        {"cpu_checkpointing": True},
        {"contiguous_memory_optimization": True, "number_checkpoints": 2},
        {"policy": "selective", "profile": True, "synchronize_checkpoint_boundary": True},
        {"partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True},
    ],
    ids=str,
)
def test_blocks_of_a_script(section: dict[str, Any] | None, tmp_path: Path) -> None:
    if section is not None:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"train_batch_size": 8, "activation_checkpointing": section}))
        deepspeed.checkpointing.configure(sc.Mesh(device="cpu"), deepspeed_config=str(path))
    assert deepspeed.checkpointing.is_configured() == (section is not None)
    expected = passes(Checkpointing(seeded(Stack), is_on=False))
    for _ in range(2):
        assert_bitwise(passes(Checkpointing(seeded(Stack))), expected)
        deepspeed.checkpointing.reset()


def test_arguments_win_over_the_file() -> None:
    section = {"cpu_checkpointing": True, "number_checkpoints": 3, "profile": True}
    checkpointing.configure(
        None, {"train_batch_size": 8, "activation_checkpointing": section}, checkpoint_in_cpu=False, num_checkpoints=5
    )
    settings = checkpointing._state.settings
    assert (settings.offload, settings.num_checkpoints, settings.profile) == (None, 5, True)
    checkpointing.set_num_layers(7)
    assert checkpointing._state.settings.num_checkpoints == 7
    assert checkpointing._state.settings.profile


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="does not say among which ranks"):
        checkpointing.configure(None, partition_activations=True)
    with pytest.raises(ConfigError, match=r"mpu_=dict.*get_model_parallel_group"):
        checkpointing.configure({})
    with pytest.raises(ConfigError, match="num_checkpoints=0"):
        checkpointing.configure(None, num_checkpoints=0)
    with pytest.raises(ConfigError, match="configure"):
        checkpointing.partition_activations_in_checkpoint(True)
    assert not checkpointing.is_configured()


class Mpu:
    """Tensor-parallel ranks as Megatron's object tells them."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


def partitioned_by_a_script() -> None:
    checkpointing.configure(Mpu(), partition_activations=True)
    expected = passes(Checkpointing(seeded(Stack), is_on=False))
    sc.comm.reset_traffic()
    assert_bitwise(passes(Checkpointing(seeded(Stack))), expected)
    assert sc.comm.traffic()["gather.calls"] == 3


def test_partitions_over_the_group_of_an_mpu() -> None:
    run_spmd(partitioned_by_a_script, 2)


def test_n8_a_forked_stream_is_repeated() -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()

    def noisy(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x.tanh(), 0.5)
        with tracker.fork():
            x = F.dropout(x * 2, 0.5)
        return (x * torch.rand_like(x)).sin()

    found = []
    for call in (lambda fn, x: fn(x), deepspeed.checkpointing.checkpoint):
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
        x = torch.linspace(0, 1, 40).requires_grad_()
        y = call(noisy, call(noisy, x))
        y.sum().backward()
        found.append([y.detach(), x.grad, torch.rand(3), *tracker.get_states().values()])
    assert_bitwise(found[1], found[0])


@spmd(world=2)
def test_f12_streams_differ_inside_and_agree_outside() -> None:
    mesh = sc.Mesh(tp=2, device="cpu")
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(5, mesh)
    shared = torch.rand(4)
    with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
        own = torch.rand(4)
    after = torch.rand(4)
    seen = sc.comm.exchange([shared.tolist(), own.tolist(), after.tolist()], mesh["tp"], "streams")
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] != seen[1][1]
    assert seen[0][2] == seen[1][2]


def test_wrong_streams() -> None:
    tracker = deepspeed.checkpointing.CudaRNGStatesTracker()
    with pytest.raises(StateError, match="there is no stream 'other'"), tracker.fork("other"):
        pass
    tracker.add("a", 1)
    for name, seed in (("a", 2), ("b", 1)):
        with pytest.raises(ConfigError, match="in use"):
            tracker.add(name, seed)


def engine_losses(section: dict[str, Any] | None, model: nn.Module) -> list[torch.Tensor]:
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    if section is not None:
        config["activation_checkpointing"] = section
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(4, 5)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("section", "is_wrapped"),
    [
        ({"policy": "full"}, True),
        ({"policy": "selective", "units": ["Block"]}, True),
        ({"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}, True),
        ({"contiguous_memory_optimization": True}, True),
        ({"number_checkpoints": 4, "profile": False}, False),
        ({"policy": "none", "cpu_checkpointing": True}, False),
    ],
    ids=str,
)
def test_one_line_of_the_file_recomputes_the_blocks(section: dict[str, Any], is_wrapped: bool) -> None:
    model = seeded(Stack)
    assert_bitwise(engine_losses(section, model), engine_losses(None, seeded(Stack)))
    assert sc.activation.is_wrapped(model) == is_wrapped


def test_a_script_that_recomputes_by_itself_is_not_doubled() -> None:
    """Its calls inside a wrapped model's blocks, and around them, are one region each."""
    calls: list[int] = []
    model = Checkpointing(seeded(Stack))
    model.model.blocks[1].up.register_forward_pre_hook(lambda *_: calls.append(1))
    losses = engine_losses({"policy": "full", "units": ["Block"]}, model)
    assert len(calls) == 2 * 3
    assert_bitwise(losses, engine_losses(None, Checkpointing(seeded(Stack), is_on=False)))


def test_a_model_that_was_wrapped_before_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = sc.activation.wrap(seeded(Stack), policy="selective")
    with caplog.at_level("INFO", "shardcore"):
        engine_losses({"policy": "full"}, model)
    assert "the section changes nothing" in caplog.text
    assert model.blocks[0].forward.settings.policy == "selective"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"partition_activation": True}, "activation_checkpointing.partition_activation.*partition_activations"),
        ({"policy": "some"}, 'policy: expected one of "none", "full", "selective"'),
        ({"units": ["Blok"], "policy": "full"}, "'Blok' is not in the model"),
    ],
)
def test_wrong_sections(section: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        engine_losses(section, seeded(Stack))
