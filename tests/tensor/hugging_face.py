"""Small Hugging Face models by configuration, and what to call them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 51
"""Divides by no number of ranks."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 4}

_OPENAI = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32}
"""Names of the oldest configurations."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "llama-tied": ("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True, "attention_bias": True}),
    "llama-multi-query": ("LlamaForCausalLM", {**_GROUPED, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED),
    "phi3": ("Phi3ForCausalLM", {k: v for k, v in _GROUPED.items() if k != "head_dim"}),
    "gpt-neox": ("GPTNeoXForCausalLM", _COMMON),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", _OPENAI),
    "gptj": ("GPTJForCausalLM", {**_OPENAI, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", {**_OPENAI, "n_head": 4, "n_ctx": 32, "rotary_dim": 4}),
    "apertus": ("ApertusForCausalLM", {k: v for k, v in _GROUPED.items() if k != "head_dim"}),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 6,
            "kv_lora_rank": 8,
            "q_lora_rank": 10,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "opt": ("OPTForCausalLM", {**_COMMON, "ffn_dim": 34, "word_embed_proj_dim": 24}),
    "bert": ("BertForMaskedLM", _COMMON),
    "roberta": ("RobertaForMaskedLM", {**_COMMON, "max_position_embeddings": 40}),
}
_DROPOUTS = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "bert": {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.5},
}
_NO_DROPOUT = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "roberta": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "opt": {"dropout": 0.0},
    "gptj": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "codegen": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def build(name: str, *, seed: int = 0, dropout: bool = False, **changes: Any) -> nn.Module:
    """A model in training mode, in double precision, with weights large enough to tell results apart."""
    import transformers

    class_name, options = CONFIGS[name]
    rates = _DROPOUTS.get(name, {}) if dropout else _NO_DROPOUT.get(name, {})
    cls: Any = getattr(transformers, class_name)
    torch.manual_seed(seed)
    model: nn.Module = cls(cls.config_class(**{**options, **rates, **changes}))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no double precision
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3) if param.dim() > 1 else param.add_(0.3 * torch.randn_like(param))
    return model.double().train()


def batch(seed: int = 0, size: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """Ids with padding at one end, and labels."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy in double precision (the library's own loss is in fp32), from whole logits."""
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
