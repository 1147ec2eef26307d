"""A Hugging Face model in stages trains as the model itself."""

from __future__ import annotations

import pytest
import torch

import shardcore as sc
from shardcore.pipeline import Pipeline
from shardcore.testing import spmd


def llama(tied: bool) -> torch.nn.Module:
    """A small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def batch(step: int, i: int) -> dict[str, torch.Tensor]:
    """Token ids with padding on the left, as a tokenizer gives them."""
    draw = torch.Generator().manual_seed(step * 10 + i)
    ids = torch.randint(0, 50, (2, 7), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def reference(tied: bool, steps: int, m: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop."""
    model = llama(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        total = 0.0
        for i in range(m):
            loss = model(**batch(step, i), use_cache=False).loss / m
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
@spmd(world=2, timeout=110)
def test_a_llama_in_stages(tied: bool) -> None:
    mesh = sc.Mesh(pp=2)
    losses, weights = reference(tied, steps=3, m=3)
    for schedule, stage in (("1f1b", 0), ("zb-v", 3)):
        pipe = Pipeline(llama(tied), mesh, schedule=schedule, num_microbatches=3)
        assert all(name in weights for name in pipe.state_dict())
        sc.shard(pipe, mesh, stage=stage)
        optimizer = sc.optimizer("sgd", pipe, lr=0.5)
        found = [float(pipe.train_batch(iter([batch(step, i) for i in range(3)]), optimizer)) for step in range(3)]
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        with sc.summon(pipe):
            for name, param in pipe.named_parameters():
                torch.testing.assert_close(param.detach(), weights[name], rtol=1e-4, atol=1e-5)
