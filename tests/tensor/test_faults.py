"""Faults of others' tensor parallelism that have no place in the tests of a layer: whole models, by their fused weights
and by what all heads share.
"""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from shardcore.protocols import find_pieces
from shardcore.testing import spmd
from tensor.hugging_face import build
from tensor.test_transformers import assert_twin

FUSED = {
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 2},  # queries, keys, values in blocks
    "gpt-neox": {"num_attention_heads": 4},  # query, key, value of one head after another
    "gpt2": {"n_head": 4},  # in blocks, transposed
}


@pytest.mark.parametrize("name", FUSED)
@spmd(world=2, timeout=110)
def test_fault_f11_fused_weights_are_cut_by_heads(name: str) -> None:
    """Results are the whole model's; and what is loaded comes back to the last bit, from ranks with parts of it."""
    report = assert_twin(name, 2, changes=FUSED[name])
    assert "colwise, attention" in report
    mesh = sc.Mesh(tp=2)
    whole, split = build(name, **FUSED[name]), build(name, seed=1, **FUSED[name])
    sc.tensor.parallelize(split, mesh)
    sc.shard(split, mesh, stage=0)
    assert any(not find_pieces(param).is_whole for param in split.parameters())
    sc.load_state_dict(split, whole.state_dict())
    found = sc.state_dict(split)
    assert bool(found) == (mesh.rank == 0)
    assert all(torch.equal(found[key], value) for key, value in whole.state_dict().items() if found)


@pytest.mark.parametrize("name", ["llama-multi-query", "qwen3", "deepseek"])
@spmd(world=2, timeout=110)
def test_fault_f17_what_all_heads_share_has_the_gradient_of_all(name: str) -> None:
    """One key head for all ranks; norms of each head; a rotary part of the keys that is projected once."""
    assert_twin(name, 2)
