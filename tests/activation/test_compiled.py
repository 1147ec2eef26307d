"""``torch.compile`` of blocks that are recomputed, and of parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardcore as sc
from activation.blocks import Block, Stack, passes, results, seeded
from shardcore.activation import checkpoint
from shardcore.testing.twin import assert_bitwise

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:The .grad attribute")  # the compiler's own


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    """Nothing compiled before counts."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_a_region_becomes_part_of_a_compiled_graph() -> None:
    block = seeded(lambda: Block(rate=0.0))
    params = list(block.parameters())
    compiled = torch.compile(lambda x: checkpoint(block, x), backend="aot_eager", fullgraph=True)
    assert_bitwise(results(compiled, params, 4, 7), results(block, params, 4, 7))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_wrapped_block_is_compiled_whole(policy: str) -> None:
    model = seeded(lambda: Stack(rate=0.0))
    expected = passes(model)
    sc.activation.wrap(model, policy=policy)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_bitwise(passes(model), expected)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_parts_of_a_region_are_compiled(policy: str, offload: str | None) -> None:
    model = seeded(lambda: Stack(rate=0.0))
    expected = passes(model)
    sc.activation.wrap(model, policy=policy, offload=offload)
    for block in model.blocks:
        for part in (block.up, block.down):
            part.compile(backend="aot_eager")
    assert_bitwise(passes(model), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


def test_a_block_with_offloaded_inputs_runs_uncompiled() -> None:
    model = seeded(lambda: Stack(rate=0.0))
    expected = passes(model)
    sc.activation.wrap(model, offload="cpu")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert_bitwise(passes(model), expected)
    assert graph_breaks() > 0
