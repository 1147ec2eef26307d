"""``zero_to_fp32`` and ``save_16bit_model``: the whole model in one piece, for programs that know nothing of shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.deepspeed.utils import zero_to_fp32
from shardcore.errors import CheckpointError, ConfigError, StorageError
from shardcore.testing import PeakTensorBytes, run_spmd, spmd, tensor_bytes


class TiedAndFrozen(nn.Module):
    """A head tied to the embedding, a layer that is not trained, and two buffers, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.still = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("factor", torch.tensor(0.75))
        self.register_buffer("count", torch.tensor([3]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.still(self.norm(self.embed(tokens))) * self.factor
        return nn.functional.cross_entropy(self.head(x).float(), tokens)


def trained(stage: int, precision: str) -> Any:
    """An engine after two steps."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine, _, _, _ = deepspeed.initialize(model=TiedAndFrozen(), config=config)
    for step in range(2):
        engine.backward(engine(torch.arange(4) + step + engine.global_rank))
        engine.step()
    return engine


Weights = dict[str, torch.Tensor]


def masters_of(engine: Any) -> Weights:
    """What the whole model is in fp32."""
    found = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        master = deepspeed.utils.safe_get_full_fp32_param(param)
        if master is None:
            with deepspeed.zero.GatheredParameters(param):
                master = param.detach().clone()
        found[name] = master.float()
    return found


def save_all(stage: int, precision: str, folder: str) -> tuple[Weights, Weights]:
    """Save in every way; returns the masters and the weights."""
    engine = trained(stage, precision)
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder)
    assert engine.save_fp16_model(folder, "trained.bin", exclude_frozen_parameters=True)
    assert not list(Path(folder).glob(".*.tmp"))
    return masters_of(engine), sc.state_dict(engine.module, rank0_only=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_g2_g3_g4_everything_is_there_at_every_stage_and_dtype(stage: int, precision: str, tmp_path: Path) -> None:
    masters, weights = run_spmd(save_all, 2, stage, precision, str(tmp_path))[0]
    frozen = {"still.weight", "still.bias"}

    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(whole) == set(TiedAndFrozen().state_dict())
    for name, value in whole.items():
        assert value.dtype == (torch.int64 if name == "count" else torch.float32), name
        if name in masters:
            assert torch.equal(value, masters[name]), name
    assert whole["head.weight"] is whole["embed.weight"]
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path, tag="global_step2", exclude_frozen_parameters=True, lazy_mode=True
    )
    assert set(lazy) == set(whole) - frozen
    for name, value in lazy.items():
        assert (value.shape, value.dtype, value.numel()) == (whole[name].shape, whole[name].dtype, whole[name].numel())
        assert torch.equal(value.contiguous(), whole[name])

    sixteen = torch.load(tmp_path / "pytorch_model.bin")
    assert set(sixteen) == set(weights)
    for name, value in weights.items():
        assert sixteen[name].dtype == value.dtype, name
        assert torch.equal(sixteen[name], value), name
    assert sixteen["head.weight"].data_ptr() == sixteen["embed.weight"].data_ptr()
    assert set(torch.load(tmp_path / "trained.bin")) == set(weights) - frozen


def test_the_program_and_its_files(tmp_path: Path) -> None:
    run_spmd(save_all, 2, 3, "bf16", str(tmp_path))
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    arguments = [str(tmp_path), str(tmp_path / "out"), "--max_shard_size", "300B"]
    assert zero_to_fp32.main(arguments) == 0
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        found.update(torch.load(tmp_path / "out" / file))
    assert len(set(index["weight_map"].values())) > 1
    assert set(found) == set(whole) == set(index["weight_map"])
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    with pytest.raises(CheckpointError, match="holds an export already"):
        zero_to_fp32.main(arguments)

    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    safe = load_file(tmp_path / "safe" / "model.safetensors")
    assert all(torch.equal(safe[name], value) for name, value in whole.items())
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "half", "bfloat16")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin")
    assert half["still.weight"].dtype == torch.bfloat16

    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(TiedAndFrozen(), tmp_path)
    assert torch.equal(model.head.weight, whole["embed.weight"])
    assert model.head.weight is model.embed.weight


def test_the_script_beside_the_checkpoints(tmp_path: Path) -> None:
    run_spmd(save_all, 2, 2, "fp32", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "zero_to_fp32.py", ".", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="max_shard_size='many'"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", "many")
    with pytest.raises(CheckpointError, match="expected one of fp32"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "out", "int4")


@spmd(world=2)
def test_what_cannot_be_written_is_told_on_every_rank(tmp_path: Path) -> None:
    engine = trained(3, "bf16")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"rank 0 could not write .*file"):
        engine.save_16bit_model(tmp_path / "file")
    with pytest.raises(ConfigError, match="to_hf"):
        engine.save_16bit_model(tmp_path, "model.safetensors")
    assert engine.save_16bit_model(tmp_path / "new" / "folder")


STAGE_WIDTH, NUM_STAGE_LAYERS = 128, 24


def save_stages(num_stages: int, folder: str) -> None:
    """Save a pipeline whose ends are tied, in every way; this rank holds little at any time."""
    spec, tied = deepspeed.pipe.LayerSpec, deepspeed.pipe.TiedLayerSpec
    layers = [spec(nn.Linear, STAGE_WIDTH, STAGE_WIDTH) for _ in range(NUM_STAGE_LAYERS)]
    ends = [tied("ends", nn.Linear, STAGE_WIDTH, STAGE_WIDTH, bias=False) for _ in range(2)]
    torch.manual_seed(3)
    model = deepspeed.PipelineModule(
        [ends[0], *layers, ends[1]], num_stages=num_stages, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    row = torch.ones(2, STAGE_WIDTH, dtype=torch.bfloat16)
    engine.train_batch(iter([(row, row)] * 2))
    engine.save_checkpoint(folder)
    before = tensor_bytes(collect=True)
    with PeakTensorBytes() as peak:
        assert engine.save_16bit_model(folder)
    whole_nbytes = 2 * STAGE_WIDTH**2 * NUM_STAGE_LAYERS
    assert peak.peak_nbytes - before < whole_nbytes / 3, peak.peak_operation
    Path(folder, "no folder").touch()
    with pytest.raises(StorageError, match="no folder"):
        engine.save_16bit_model(Path(folder, "no folder"))


def test_stages_of_a_pipeline_join_in_one_file(tmp_path: Path) -> None:
    run_spmd(save_stages, 4, 2, str(tmp_path))
    whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    sixteen = torch.load(tmp_path / "pytorch_model.bin")
    assert set(sixteen) == set(whole)
    for name, value in whole.items():
        assert sixteen[name].dtype == torch.bfloat16, name
        assert torch.equal(sixteen[name], value.bfloat16()), name
    assert len({value.data_ptr() for value in sixteen.values()}) == 2 * NUM_STAGE_LAYERS + 1 == len(sixteen) - 1
    assert not list(tmp_path.glob(".*"))
    assert zero_to_fp32.main([str(tmp_path), str(tmp_path / "out")]) == 0
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert all(torch.equal(found[name], value) for name, value in whole.items())
