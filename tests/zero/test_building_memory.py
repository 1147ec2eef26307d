"""Peak tensor bytes while a model of P bytes is built on W ranks: under (P/W + largest unit) x 1.2.

From the constructor, or the checkpoint, to the end of ``sc.shard`` at stage 3; all storages are counted, at every
operation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.testing import PeakTensorBytes, run_spmd, spmd
from shardcore.zero.units import assign_units
from zero.built import Block


def stack(num_layers: int) -> Callable[[], nn.Module]:
    """Equal layers, each a unit."""
    return lambda: nn.Sequential(*(nn.Linear(96, 96) for _ in range(num_layers)))


class Framed(nn.Module):
    """A large embedding tied to the head around blocks: the largest unit is one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1500, 48)
        self.blocks = nn.ModuleList(Block(48) for _ in range(5))
        self.head = nn.Linear(48, 1500, bias=False)
        self.head.weight = self.embed.weight


def transformer(kind: str) -> Callable[[], nn.Module]:
    """A tiny Llama or GPT-2 whose blocks dwarf its buffers."""
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=600, n_positions=16)
        return lambda: transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, vocab_size=600
    )
    return lambda: transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Callable[[], nn.Module]]] = {
    "few layers": lambda: stack(6),
    "many layers": lambda: stack(24),
    "framed": lambda: Framed,
    "llama": lambda: transformer("llama"),
    "gpt2": lambda: transformer("gpt2"),
}


def check_peak(how: str, name: str, path: str) -> None:
    make = MODELS[name]()
    with torch.device("meta"):
        model = make()
    whole = sum(param.nbytes for param in model.parameters())
    units = assign_units(model, "auto").units
    largest = max(sum(param.nbytes for param in unit.params.values()) for unit in units)
    bound = (whole / sc.Mesh().world + largest) * 1.2
    with PeakTensorBytes() as memory:
        if how == "sharded_init":
            with sc.sharded_init():
                model = make()
        else:
            with torch.device("meta"):
                model = make()
        if how == "load":
            sc.load_safetensors(model, path)
        sc.shard(model)
    used = memory.peak_nbytes - memory.start_nbytes
    assert used < bound, f"{used / bound:.2f} x the bound, at {memory.peak_operation}"
    assert used > whole / sc.Mesh().world, "the count saw the shards"


@pytest.mark.parametrize("how", ["meta", "sharded_init", "load"])
@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("few layers", 4),
        ("framed", 2),
        ("llama", 4),
        ("gpt2", 2),
        *[
            pytest.param(name, world, marks=pytest.mark.full)
            for name, world in [
                ("few layers", 2),
                ("many layers", 2),
                ("many layers", 4),
                ("framed", 4),
                ("llama", 2),
                ("gpt2", 4),
            ]
        ],
    ],
)
def test_the_peak_while_building(how: str, name: str, world: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if how == "load":
        from safetensors.torch import save_model

        save_model(MODELS[name]()(), str(path))
    run_spmd(check_peak, world, how, name, str(path))


def resident_nbytes(what: str) -> int:
    """``VmRSS`` or ``VmHWM`` (its peak) of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("how", ["meta", "sharded_init", "whole"])
@spmd(world=2)
def test_the_resident_peak_while_building(how: str) -> None:
    """The allocator gives back what is freed, although each unit is smaller than what it likes to keep."""
    num_blocks, width = 24, 512

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, 4 * width, bias=False) for _ in range(num_blocks)))

    unit = 16 * width * width
    contexts = {"meta": torch.device("meta"), "sharded_init": sc.sharded_init(), "whole": nullcontext()}
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak so far
    before = resident_nbytes("VmRSS")
    with contexts[how]:
        model = make()
    sc.shard(model)
    whole = num_blocks * unit
    bound = (whole if how == "whole" else whole // 2) + 4 * unit + (16 << 20)
    used = resident_nbytes("VmHWM") - before
    assert used < bound, f"{used >> 20} MiB, {used / bound:.2f} x the bound"
