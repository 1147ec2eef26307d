"""A Hugging Face model in stages trains as the model itself."""

from __future__ import annotations

from typing import Any

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


_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_OLD_SIZES = {"vocab_size": 50, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
OTHERS: dict[str, dict[str, Any]] = {
    # learned positions, tied embeddings, and no plan of its own
    "GPT2LMHeadModel": {**_OLD_SIZES, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    # every other layer sees three tokens only
    "Gemma2ForCausalLM": {**_SIZES, "head_dim": 8, "sliding_window": 3},
    # multiplies embeddings by a factor, in its forward
    "GraniteForCausalLM": {**_SIZES, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "MixtralForCausalLM": {**_SIZES, "num_local_experts": 3, "sliding_window": None},
    # dropouts between embedding and blocks
    "GPTJForCausalLM": {**_OLD_SIZES, "rotary_dim": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "GPTNeoXForCausalLM": {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"},
    "PhiForCausalLM": _SIZES,
}
_IN_EVERY_RUN = ("GPT2LMHeadModel", "Gemma2ForCausalLM", "GraniteForCausalLM")


def other(name: str) -> torch.nn.Module:
    """A model with weights large enough to tell layers apart."""
    import transformers

    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**OTHERS[name]))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(5) if param.dim() > 1 else param.add_(0.1 * torch.randn_like(param))
    return model.train()


@pytest.mark.parametrize(
    "name", [name if name in _IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.full) for name in OTHERS]
)
@spmd(world=2, timeout=110)
def test_what_else_models_do_between_embedding_and_head(name: str) -> None:
    mesh = sc.Mesh(pp=2)
    whole = other(name)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    losses = []
    for step in range(2):
        loss = whole(**batch(step, 0), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    pipe = Pipeline(other(name), mesh)
    sc.shard(pipe, mesh, stage=1)
    optimizer = sc.optimizer("sgd", pipe, lr=0.05)
    found = [float(pipe.train_batch(iter([batch(step, 0)]), optimizer)) for step in range(2)]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
    for key, param in pipe.named_parameters():
        torch.testing.assert_close(param.detach(), whole.get_parameter(key).detach(), rtol=1e-4, atol=1e-5)
