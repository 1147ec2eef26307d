"""Hugging Face's Llama and GPT-2, built from a configuration: the same losses and gradients, caches handled."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardcore as sc
from shardcore.errors import StateError
from shardcore.testing.twin import assert_bitwise

TOKENS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))


LLAMA_ARGUMENTS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in LLAMA_ARGUMENTS else "past_key_values"
"""What the installed transformers calls a cache."""

MODELS = {"llama": llama, "gpt2": gpt2}
all_models = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def switch(model: Any, way: str) -> None:
    """Turn Hugging Face's own recomputation on or off, by whichever name it has."""
    kinds = ("activation_checkpointing", "gradient_checkpointing")
    getattr(model, next(f"{kind}_{way}" for kind in kinds if hasattr(model, f"{kind}_{way}")))()


def train_once(model: Any, **arguments: Any) -> list[torch.Tensor]:
    """The loss and all gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    loss = model(input_ids=TOKENS, labels=TOKENS, attention_mask=mask, **arguments).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


all_options = pytest.mark.parametrize("options", [{}, {"policy": "selective"}, {"offload": "cpu"}], ids=str)


@all_models
@all_options
def test_the_same_gradients(name: str, options: dict[str, Any]) -> None:
    expected = train_once(build(name), use_cache=False)
    model = sc.activation.wrap(build(name), **options)
    assert [type(m).__name__ for m in model.modules() if "forward" in vars(m)] == [
        {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}[name]
    ] * 2
    assert_bitwise(train_once(model), expected)  # although the model's default is to make a cache
    assert_bitwise(train_once(model, use_cache=False), expected)


@all_models
def test_generation_and_caches_in_evaluation_mode(name: str) -> None:
    plain, model = build(name).eval(), sc.activation.wrap(build(name)).eval()
    expected = plain.generate(TOKENS[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert_bitwise(model.generate(TOKENS[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0), expected)
    # Step by step, with gradients enabled, as an interactive session does.
    past = transformers.DynamicCache(config=model.config)
    model(TOKENS[:, :4], use_cache=True, **{CACHE: past})
    assert past.get_seq_length() == 4
    second = model(TOKENS[:, 4:], **{CACHE: past})
    torch.testing.assert_close(second.logits, plain(TOKENS).logits[:, 4:])


@all_models
def test_a_prefix_in_the_cache_counts_in_training(name: str) -> None:
    """As in prefix tuning: keys and values that are trained come in by the cache."""
    found = []
    for model in (build(name), sc.activation.wrap(build(name))):
        prefix = [torch.ones(2, {"llama": 2, "gpt2": 2}[name], 3, {"llama": 4, "gpt2": 8}[name]).requires_grad_()] * 2
        past = transformers.DynamicCache()
        for layer in range(2):
            past.update(prefix[0], prefix[1], layer)
        torch.manual_seed(1)
        loss = model(TOKENS, labels=TOKENS, **{CACHE: past}).loss
        loss.backward()
        found.append([loss.detach(), prefix[0].grad, *(p.grad for p in model.parameters())])
    assert_bitwise(found[1], found[0])


@all_models
def test_hugging_faces_own_checkpointing_is_not_doubled(name: str) -> None:
    model = build(name)
    switch(model, "enable")
    with pytest.raises(StateError, match=r"gradient_checkpointing on.*checkpointing_disable"):
        sc.activation.wrap(model)
    switch(model, "disable")
    sc.activation.wrap(model)
    switch(model, "enable")
    with pytest.raises(StateError, match=r"\.0 has gradient_checkpointing on"):
        train_once(model)


@all_models
def test_names_in_the_state_dict(name: str) -> None:
    assert list(sc.activation.wrap(build(name)).state_dict()) == list(build(name).state_dict())


def test_blocks_of_an_encoder_and_decoder() -> None:
    """The encoder's output is one tensor that every block of the decoder takes."""
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
    )

    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    found = []
    for options in (None, {}, {"offload": "cpu"}, {"policy": "selective"}):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        found.append(run(model if options is None else sc.activation.wrap(model, **options)))
    for other in found[1:]:
        assert_bitwise(other, found[0])


SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
GROUPED: dict[str, Any] = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4, "output_router_logits": True}),
    "Qwen3": ("ForCausalLM", GROUPED),
    "Gemma2": ("ForCausalLM", GROUPED),
    "Bert": ("ForMaskedLM", {**SMALL, "num_attention_heads": 4}),
    "OPT": (
        "ForCausalLM",
        {"vocab_size": 50, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "word_embed_proj_dim": 16},
    ),
    "Mamba": ("ForCausalLM", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
@all_options
def test_other_families(family: str, options: dict[str, Any]) -> None:
    kind, sizes = OTHERS[family]

    def make() -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes, use_cache=False)
        return getattr(transformers, family + kind)(config).train()

    assert_bitwise(train_once(sc.activation.wrap(make(), **options)), train_once(make()))
