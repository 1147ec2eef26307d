"""A rank loads into what it keeps, through one buffer; an export holds a part of one file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.checkpoint.writing import BLOCK_NBYTES
from shardcore.testing import PeakTensorBytes, run_spmd, tensor_bytes

WIDTH, NUM_LAYERS, WORLD = 512, 12, 4
NUMEL = WIDTH * WIDTH * NUM_LAYERS
CONVERTED_NBYTES = 8 << 20
"""The buffer through which values go whose dtype changes."""


def training(stage: int, precision: str | None, home: str | None) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    offload = sc.Offload(states=home) if home else None
    sc.shard(model, sc.Mesh(device="cpu"), stage=stage, precision=precision, offload=offload)
    return model, sc.optimizer("adamw", model, lr=1e-3)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, WIDTH, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder: str) -> None:
    model, optimizer = training(3, None, None)
    step(model, optimizer)
    sc.checkpoint.save(folder, model, optimizer)


def load(folder: str, stage: int, precision: str | None, home: str | None, fresh: bool) -> None:
    model, optimizer = training(stage, precision, home)
    if not fresh:
        step(model, optimizer)
    shard_nbytes = NUMEL // WORLD * 4
    before = tensor_bytes(collect=True)
    with PeakTensorBytes() as peak:
        sc.checkpoint.load(folder, model, optimizer)
    kept = tensor_bytes(collect=True) - before
    assert kept <= (2 * shard_nbytes if fresh else 0) + 4096, "what is kept is this rank's shard of both moments"
    above = peak.peak_nbytes - before
    whole = 0 if stage == 3 else NUMEL * (2 if precision else 4) // WORLD  # gathered anew, shard by shard
    assert above <= kept + CONVERTED_NBYTES + whole, f"{above} bytes at {peak.peak_operation}, {kept} are kept"


@pytest.mark.parametrize(
    ("stage", "precision", "home", "fresh"),
    [
        (3, None, None, True),
        (3, None, None, False),
        (3, "bf16", None, True),
        (2, "bf16", "cpu", False),
        (1, None, None, True),
    ],
)
def test_a_rank_loads_within_its_shard_and_one_buffer(
    stage: int, precision: str | None, home: str | None, fresh: bool, tmp_path: Path
) -> None:
    run_spmd(save, 2, str(tmp_path))
    run_spmd(load, WORLD, str(tmp_path), stage, precision, home, fresh)


def only_own_file(checkpoint: Path, out: Path, rank: int) -> None:
    """The checkpoint as this rank may see it: of other ranks' files only the headers are there, and holes for the rest,
    which no checksum passes.
    """
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for number, file in enumerate(json.loads((checkpoint / "index.json").read_text())["files"]):
        if number == rank:
            shutil.copy(checkpoint / file["name"], out / file["name"])
            continue
        with (checkpoint / file["name"]).open("rb") as whole, (out / file["name"]).open("wb") as holes:
            holes.write(whole.read(file["header_nbytes"]))
            holes.truncate(file["nbytes"])


def load_from_own_file(folder: str) -> None:
    model, optimizer = training(3, None, "cpu")
    step(model, optimizer)
    sc.checkpoint.save(f"{folder}/run", model, optimizer, tag="saved")
    rank = sc.Mesh(device="cpu").rank
    only_own_file(Path(folder, "run", "saved"), Path(folder, f"rank{rank}", "saved"), rank)
    saved = [value.clone() for value in (*optimizer.states(), *map(sc.zero.local_master, model.parameters()))]
    step(model, optimizer)
    before = tensor_bytes(collect=True)
    with PeakTensorBytes() as peak:
        sc.checkpoint.load(f"{folder}/rank{rank}", model, optimizer)
    assert peak.peak_nbytes - before <= CONVERTED_NBYTES, peak.peak_operation
    loaded = [*optimizer.states(), *map(sc.zero.local_master, model.parameters())]
    assert len(saved) > NUM_LAYERS
    assert all(torch.equal(*pair) for pair in zip(saved, loaded, strict=True))


def test_d14_a_rank_reads_nothing_but_its_own_share_of_states(tmp_path: Path) -> None:
    run_spmd(load_from_own_file, WORLD, str(tmp_path))


def sparse_checkpoint(run: Path, shapes: dict[str, list[int]]) -> None:
    """A checkpoint of fp32 zeros, whose file takes no room on the disk."""
    spans, offset = {}, 0
    for name, shape in shapes.items():
        spans[name] = (offset, offset + 4 * prod(shape))
        offset = spans[name][1]
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": list(spans[name])} for name, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    aside = Path(sc._core.begin_checkpoint(run, "step0"))
    with (aside / "rank-00000.safetensors").open("wb") as file:
        file.write(content)
        file.truncate(len(content) + offset)
    block = f"{zlib.crc32(bytes(BLOCK_NBYTES)):08x}"

    def sums(nbytes: int) -> str:
        whole, rest = divmod(nbytes, BLOCK_NBYTES)
        return block * whole + (f"{zlib.crc32(bytes(rest)):08x}" if rest else "")

    tensors = [
        {
            "role": "weight", "name": name, "dtype": "F32", "shape": shape,
            "pieces": [
                {
                    "file": 0, "offset": len(content) + spans[name][0], "start": 0, "stop": prod(shape),
                    "crc32": sums(4 * prod(shape)),
                }
            ],
        }
        for name, shape in sorted(shapes.items())
    ]  # fmt: skip
    file = {"name": "rank-00000.safetensors", "nbytes": len(content) + offset, "header_nbytes": len(content)}
    file["header_crc32"] = f"{zlib.crc32(content):08x}"
    weights = {name: {"aliases": [], "dtype": "float32", "trainable": True} for name in shapes}
    training = {"weights": weights, "buffers": {}, "optimizer": None}
    index = {
        "format": "shardcore-checkpoint", "version": 1, "block_nbytes": BLOCK_NBYTES, "files": [file],
        "tensors": tensors, "training": training,
    }  # fmt: skip
    sc._core.commit_checkpoint(run, "step0", json.dumps(index), is_latest=True)


EXPORT = """
import sys
from shardcore.checkpoint import to_hf
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
before = peak()
files = to_hf(sys.argv[1], sys.argv[2], dtype="bf16", max_shard_nbytes=int(sys.argv[3]))
print(len(files), before, peak())
"""
"""The peak is that of this memory: ``ru_maxrss`` would be at least what the parent had when it forked."""


def export(folder: Path, numel: int, num_layers: int, shard_nbytes: int) -> tuple[int, int]:
    """Export so many elements in so many tensors. Returns (peak of the process, size of the largest file) in bytes;
    what is more than torch itself needs is little.
    """
    width = 4096
    sparse_checkpoint(folder / "run", {f"layers.{i}": [numel // num_layers // width, width] for i in range(num_layers)})
    command = [sys.executable, "-c", EXPORT, str(folder / "run"), str(folder / "out"), str(shard_nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_files, before, peak = map(int, done.stdout.split())
    assert num_files >= 4
    assert peak - before < 100e6, f"{peak} bytes, and {before} before the export"
    return peak, max(file.stat().st_size for file in (folder / "out").glob("*.safetensors"))


def test_an_export_needs_little_besides_torch(tmp_path: Path) -> None:
    export(tmp_path, 40_000_000, 20, 20_000_000)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_an_export_of_two_billion_parameters_needs_less_than_a_file_and_a_little(tmp_path: Path) -> None:
    peak, largest = export(tmp_path, 2_000_000_000, 80, 1_000_000_000)
    assert peak < largest + 300e6, f"{peak} bytes, and the largest file has {largest}"
