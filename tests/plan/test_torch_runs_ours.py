"""torch's pipeline runtime executes our lowered programs and trains as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from plan.torch_form import WAITS
from shardcore import plan
from shardcore.testing import spmd

WIDTH, NUM_MICROBATCHES = 4, 6


def layers(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (2 * NUM_MICROBATCHES, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@spmd(world=2)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v", "looped-bfs"])
def test_gradients_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage

    schedule = plan.pipeline_schedule(name, 2, NUM_MICROBATCHES)
    num_stages, rank = schedule.num_stages, dist.get_rank()
    inputs, targets = data()
    chunks, twin = layers(num_stages), nn.Sequential(*layers(num_stages))
    nn.functional.mse_loss(twin(inputs), targets).backward()

    local = [PipelineStage(chunks[stage], stage, num_stages, torch.device("cpu")) for stage in schedule.stages(rank)]
    runtime = torch_schedules._PipelineScheduleRuntime(local, NUM_MICROBATCHES, loss_fn=nn.MSELoss())
    path = tmp_path / f"rank{rank}.csv"
    path.write_bytes(schedule.lower(zero_stage=1).to_torch_csv(waits=WAITS).encode())
    runtime._load_csv(path, format="compute_comms")
    first, last = 0 in schedule.stages(rank), num_stages - 1 in schedule.stages(rank)
    runtime.step(*([inputs] if first else []), target=targets if last else None)
    for stage in schedule.stages(rank):
        for mine, expected in zip(chunks[stage].parameters(), twin[stage].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad)  # sums over micro-batches in another order
