"""Names of DeepSpeed's that scripts import: optimizers, collectives, the device, topologies, the package itself."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
import shardcore.deepspeed as deepspeed
from shardcore.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shardcore.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shardcore.deepspeed.ops.lion import DeepSpeedCPULion
from shardcore.deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
from shardcore.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from shardcore.errors import ConfigError
from shardcore.testing import spmd


def trained(make: Any) -> torch.Tensor:
    param = nn.Parameter(torch.linspace(-1.0, 1.0, 12))
    optimizer = make([param])
    for step in range(5):
        param.grad = torch.sin(torch.arange(12.0) + step)
        optimizer.step()
        optimizer.zero_grad()
    return param.detach()


@pytest.mark.parametrize(
    ("theirs", "torchs"),
    [
        (DeepSpeedCPUAdam, torch.optim.AdamW),
        (FusedAdam, torch.optim.AdamW),
        (lambda p, **k: DeepSpeedCPUAdam(p, adamw_mode=False, **k), torch.optim.Adam),
        (lambda p, **k: FusedAdam(p, adam_w_mode=False, **k), torch.optim.Adam),
        (DeepSpeedCPUAdagrad, torch.optim.Adagrad),
    ],
)
def test_optimizers_are_torchs(theirs: Any, torchs: Any) -> None:
    options = {"lr": 0.1, "weight_decay": 0.1}
    expected = trained(lambda params: torchs(params, **options))
    torch.testing.assert_close(trained(lambda params: theirs(params, **options)), expected, rtol=1e-6, atol=1e-7)


def test_adam_decays_nothing_unless_told() -> None:
    expected = trained(lambda params: torch.optim.AdamW(params, weight_decay=0.0))
    for make in (DeepSpeedCPUAdam, FusedAdam):
        torch.testing.assert_close(trained(make), expected, rtol=1e-6, atol=1e-7)


def test_lion_takes_signs() -> None:
    assert torch.allclose(
        trained(lambda params: DeepSpeedCPULion(params, lr=0.5, betas=(0.0, 0.0))),
        torch.linspace(-1.0, 1.0, 12) - 0.5 * sum(torch.sin(torch.arange(12.0) + step).sign() for step in range(5)),
    )


@pytest.mark.parametrize("make", [DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad])
def test_what_no_kernel_has_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="amsgrad"):
        make([nn.Parameter(torch.ones(2))], amsgrad=True)


@pytest.mark.parametrize("make", [DeepSpeedCPUAdam, FusedAdam])
def test_no_bias_correction_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="bias_correction"):
        make([nn.Parameter(torch.ones(2))], bias_correction=False)


@spmd(world=2)
def test_they_train_under_an_engine() -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2}}
    found = []
    for make in (DeepSpeedCPUAdam, FusedAdam):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=make(model.parameters(), lr=0.1), config=config)
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 3)).square().sum())
            engine.step()
        found.append(sc.state_dict(model, rank0_only=False)["weight"])
    torch.testing.assert_close(*found)


@spmd(world=2)
def test_collectives_take_the_keywords_of_deepspeeds_log() -> None:
    dist = deepspeed.comm
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    value = torch.full((2,), float(rank + 1))
    dist.all_reduce(value, op=dist.ReduceOp.SUM, group=group, prof=True, log_name="sum")
    assert value.tolist() == [3.0, 3.0]
    gathered = torch.empty(2)
    dist.allgather_fn(gathered, torch.tensor([float(rank)]), debug=None)
    assert gathered.tolist() == [0.0, 1.0]
    assert dist.get_all_ranks_from_group(dist.get_world_group()) == [0, 1]
    assert (dist.get_world_size(), dist.get_local_rank(), dist.is_initialized()) == (2, rank, True)
    dist.barrier()


def test_the_device_answers() -> None:
    device = deepspeed.accelerator.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert device.device_name() == kind
    assert torch.empty(1, device=device.current_device_name()).device.type == kind
    assert device.on_accelerator(torch.empty(1, device=kind))
    assert device.communication_backend_name() == {"cuda": "nccl", "cpu": "gloo"}[kind]
    assert 0 < device.memory_allocated() < device.total_memory()
    assert 0 < device.max_memory_allocated() < device.total_memory()
    assert torch.float32 in device.supported_dtypes()
    device.synchronize()
    device.empty_cache()


def test_schedules_are_there() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert WarmupLR(optimizer, warmup_num_steps=10).get_last_lr() == [0.0]
    assert "WarmupLR" in VALID_LR_SCHEDULES


def test_topologies_number_ranks() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert (grid.world_size(), grid.get_dim("pipe"), grid.get_dim("none")) == (12, 2, 0)
    assert grid.get_rank(pipe=1, data=2, model=1) == 11
    assert tuple(grid.get_coord(7)) == (1, 0, 1)
    assert grid.get_rank_repr(7) == "model_01"
    assert grid.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert grid.get_axis_comm_lists("pipe") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert grid.filter_match(pipe=0, model=1) == grid.get_axis_list("pipe", 0)[1::2] == [1, 3, 5]
    assert PipeDataParallelTopology(2, 4).get_axis_names() == ["pipe", "data"]
    for wrong in (
        lambda: ProcessTopology(["a", "a"], [1, 2]),
        lambda: ProcessTopology(["a"], [0]),
        lambda: grid.get_rank(pipe=0),
        lambda: grid.get_rank(pipe=0, data=3, model=0),
        lambda: grid.get_coord(12),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_a_loader_repeats() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))


@spmd(world=2)
def test_log_dist_speaks_on_the_ranks_it_is_told() -> None:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(deepspeed.utils.logger, "log", lambda level, text, *values: said.append(text % values))
        for ranks in (None, [1], [-1]):
            deepspeed.utils.log_dist(f"to {ranks}", ranks=ranks, level=logging.INFO)
    rank = deepspeed.comm.get_rank()
    assert said == [f"[Rank {rank}] to {ranks}" for ranks in ((None, [-1]) if rank == 0 else ([1], [-1]))]


INSTALL = """
import shardcore.deepspeed as ours
ours.install(); ours.install()
import deepspeed, importlib.util
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed import zero, comm as dist
import deepspeed.utils
assert deepspeed is ours and zero is ours.zero and deepspeed.utils is ours.utils
assert ours.__spec__.name == "shardcore.deepspeed" and importlib.util.find_spec("deepspeed") is not None
try:
    import deepspeed.moe
except ModuleNotFoundError as error:
    assert "mixture-of-experts" in str(error), error
else:
    raise SystemExit("no error")
"""

TOO_LATE = """
import sys, types
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
import shardcore.deepspeed as ours
try:
    ours.install()
except RuntimeError as error:
    assert "call install() before" in str(error), error
else:
    raise SystemExit("no error")
"""


@pytest.mark.parametrize("code", [INSTALL, TOO_LATE])
def test_installed_it_answers_to_deepspeeds_name(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
