"""Hugging Face models that have no pipeline plan, cut at their repeated blocks, train as the models themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from pipeline.test_transformers import batch
from shardcore.errors import ConfigError
from shardcore.pipeline import Pipeline, build_layers
from shardcore.testing import spmd

HEADS = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "OPT": {**HEADS, "word_embed_proj_dim": 8, "ffn_dim": 32, "max_position_embeddings": 32},
    "Bloom": {"hidden_size": 16, "n_layer": 4, "n_head": 2},
    "GPTNeo": {
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
        "embed_dropout": 0.5,
        "max_position_embeddings": 32,
    },
    "GPTBigCode": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32},
    "Mpt": {"d_model": 16, "n_layers": 4, "n_heads": 2, "max_seq_len": 32},
    "Falcon": HEADS,
    "Bert": {**HEADS, "intermediate_size": 32},
}
"""Projections and learned positions before the blocks, tuples between them, masks that differ from block to block."""
NO_DROPOUT = {"OPT": {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}, "Bloom": {}}


def build(name: str, *, dropout: bool = False) -> Any:
    """A tiny language model."""
    import transformers

    torch.manual_seed(0)
    sizes = SIZES[name] | ({} if dropout else NO_DROPOUT[name])
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **sizes)
    return getattr(transformers, f"{name}ForMaskedLM" if name == "Bert" else f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", SIZES)
def test_the_links_do_what_the_model_does(name: str) -> None:
    model = build(name, dropout=True).eval()
    inputs = {key: value for key, value in batch(0, 0).items() if key != "labels"}
    layers = build_layers(model)
    assert len(layers) == 6, "what comes before, four blocks, the head"
    value: Any = inputs
    for layer in layers:
        value = layer.apply(value)
    assert torch.equal(value, model(**inputs, use_cache=False).logits)


def by_itself(name: str, steps: int, m: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        found = [model(**batch(step, i), use_cache=False).loss / m for i in range(m)]
        for loss in found:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(loss.detach()) for loss in found))
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", NO_DROPOUT)
@spmd(world=2, timeout=170)
def test_a_model_in_stages(name: str) -> None:
    """Losses and weights are the model's own, tied embeddings, masks and positions included; no rank has all of it."""
    mesh = sc.Mesh(pp=2)
    losses, weights = by_itself(name, steps=3, m=3)
    pipe = Pipeline(build(name), mesh, schedule="zb-h1", num_microbatches=3)
    assert all(key in weights for key in pipe.state_dict())
    own = sc.comm.exchange(sorted(pipe.state_dict()), mesh["pp"], "names")
    assert {key for keys in own for key in keys} == {key for key, _ in build(name).named_parameters()} | set(own[1])
    sc.shard(pipe, mesh, stage=1)
    optimizer = sc.optimizer("sgd", pipe, lr=0.5)
    found = [float(pipe.train_batch(iter([batch(step, i) for i in range(3)]), optimizer)) for step in range(3)]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
    with sc.summon(pipe):
        for key, param in pipe.named_parameters():
            torch.testing.assert_close(param.detach(), weights[key], rtol=1e-4, atol=1e-5)


@spmd(world=2)
def test_dropout_outside_the_blocks_knows_evaluation() -> None:
    """The embedding's dropout stands in no part, and still is off in ``eval_batch`` and on in training."""
    mesh = sc.Mesh(pp=2)
    model = build("GPTNeo", dropout=True).eval()
    with torch.no_grad():
        wanted = float(model(**batch(0, 0)).loss)
    pipe = Pipeline(model.train(), mesh)
    for _ in range(2):
        assert float(pipe.eval_batch(iter([batch(0, 0)]))) == pytest.approx(wanted, rel=1e-5)
        assert float(pipe.train_batch(iter([batch(0, 0)]))) != pytest.approx(wanted, rel=1e-5)


class Between(nn.Module):
    """Changes the hidden states between its blocks."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.config, self.base_model_prefix = object(), "model"
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(())) if parameter else 2.0

    def forward(self, input_ids: torch.Tensor, use_cache: bool, return_dict: bool) -> Any:
        """Logits."""
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden if isinstance(self.scale, nn.Parameter) else hidden * self.scale)
        return self.head(hidden * self.scale)


def test_what_cannot_be_cut_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    with pytest.raises(ConfigError, match="does not pass one tensor from each block of 'blocks' to the next"):
        Pipeline(Between(parameter=False), sc.Mesh())
    with pytest.raises(ConfigError, match="its forward does not show where they are used: in ''"):
        Pipeline(Between(parameter=True), sc.Mesh())
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    with pytest.raises(ConfigError, match="has 2 lists of blocks"):
        Pipeline(T5ForConditionalGeneration(config), sc.Mesh())
