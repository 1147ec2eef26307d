"""The states of half a billion parameters on a disk: host memory as planned, by its own books and by the kernel's."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

import shardcore as sc
from offload.disks import disk_nbytes, need_disk
from offload.given import CountedPool
from shardcore import plan
from shardcore.offload import taking
from shardcore.protocols import find_root
from shardcore.testing import PeakTensorBytes, spmd, tensor_bytes

WIDTH, NUM_LAYERS, TILE_NUMEL, NUM_TILES = 8192, 8, 1 << 22, 4
UNIT_NUMEL = WIDTH * WIDTH
NUMEL = NUM_LAYERS * UNIT_NUMEL
GRADS, TILES, BUCKET = 4 * NUMEL, NUM_TILES * 12 * TILE_NUMEL, 4 * UNIT_NUMEL
"""Bytes: the gradients of all parameters in fp32, the tiles in host memory, and the gradients of a unit."""
FILE = 12 * NUMEL
OPTIONS: dict[str, Any] = {"lr": 0.5 / WIDTH, "betas": (0.5, 0.5), "weight_decay": 0.0}


# Full: it moves 17 GB to and from a disk in a file of 6.4 GB, and takes 5 GB of memory and a minute or more.
@pytest.mark.full
@pytest.mark.timeout(1200)
@spmd(world=1, timeout=1190)
def test_an_update_takes_gradients_tiles_and_less_than_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_disk(tmp_path, FILE)
    monkeypatch.setattr(taking, "HostPool", CountedPool)
    CountedPool.taken.clear()
    model = bare_model()
    tensors, resident = tensor_bytes(collect=True), resident_nbytes()
    mesh = sc.Mesh(device="cpu")
    offload = sc.Offload(states="nvme", grads="cpu", path=tmp_path, tile_numel=TILE_NUMEL, num_tiles=NUM_TILES)
    sc.shard(model, mesh, stage=2, precision="bf16", units=list(model), offload=offload)
    optimizer = sc.optimizer(torch.optim.AdamW, model, **OPTIONS)

    planned = plan.host_memory([group.layout for group in find_root(model).groups], offload.homes(mesh.device))
    assert (planned.grads, planned.states, planned.total, planned.disk) == (GRADS, TILES, GRADS + TILES, FILE)
    assert sum(CountedPool.taken) == planned.total
    counters = 4 * NUMEL // TILE_NUMEL  # AdamW counts the steps of each tile
    assert 0 <= tensor_bytes(collect=True) - tensors - planned.total <= counters
    assert abs(resident_nbytes() - resident - planned.total) <= BUCKET // 4

    store: Any = optimizer._update.store
    for step in range(2):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().mean().backward()
        gc.collect()
        before = (store.read_nbytes, store.written_nbytes, *disk_nbytes())
        with PeakTensorBytes() as tensors_of_step, PeakResident() as pages_of_step:
            optimizer.step()
        after = (store.read_nbytes, store.written_nbytes, *disk_nbytes())
        optimizer.zero_grad()
        above = [peak.peak_nbytes - peak.start_nbytes for peak in (tensors_of_step, pages_of_step)]
        assert planned.total + max(above) < GRADS + TILES + BUCKET, above
        read, written, kernel_read, kernel_written = (end - begin for begin, end in zip(before, after, strict=True))
        assert (read, written) == (FILE - TILES if step else 0, FILE - TILES)
        assert (
            0 <= kernel_read + kernel_written - read - written <= 1 << 20
        )  # a file system writes about its files, too
        assert kernel_read + kernel_written <= 24 * NUMEL
    check_values(model)


def bare_model() -> nn.Sequential:
    """Layers whose every element is 1 / width, so that ones stay ones, and every gradient is 1 / width, too."""
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1 / WIDTH)
    return model


def check_values(model: nn.Module) -> None:
    """All elements are what torch makes of one: the first step halves it, which halves the ones in each layer."""
    twin = nn.Parameter(torch.tensor([1 / WIDTH]))
    optimizer = torch.optim.AdamW([twin], **OPTIONS)
    for gradient in (1 / WIDTH, 1 / WIDTH / 2 ** (NUM_LAYERS - 1)):
        twin.grad = torch.tensor([gradient])
        optimizer.step()
    for param in model.parameters():
        low, high = torch.aminmax(param.detach())
        assert low == high
        torch.testing.assert_close(high.float(), twin.detach()[0], rtol=2.0**-8, atol=0.0)  # the last place of a bf16


def resident_nbytes() -> int:
    """Bytes of this process's memory that no file backs, as the kernel counts them."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


class PeakResident:
    """Context manager: the most of :func:`resident_nbytes` that a thread has seen, which looks every millisecond."""

    def __enter__(self) -> Self:
        self.start_nbytes = self.peak_nbytes = resident_nbytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.peak_nbytes = max(self.peak_nbytes, resident_nbytes())
            time.sleep(1e-3)
