"""Real architectures at tiny size: built by their configuration from transformers, with batches and a loss per sample.

``transformers`` is imported inside the functions, so that test collection does not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH = 64, 6
Batch = dict[str, torch.Tensor]


class WithLoss(nn.Module):
    """A model of transformers that is called with its labels and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """The mean loss over the tokens, or samples, of the batch."""
        return self.model(**batch).loss  # type: ignore[no-any-return]


class PairsOfClip(nn.Module):
    """CLIP with a loss per pair: its own contrasts each sample with the rest of the rank's batch, not of the whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """The mean of softplus(-similarity) over pairs."""
        return nn.functional.softplus(-self.model(**batch).logits_per_text.diagonal()).mean()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(seed: int, rows: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=_generator(seed))


def _text(seed: int, rows: int) -> Batch:
    tokens = _tokens(seed, rows)
    return {"input_ids": tokens, "labels": tokens}


def _translation(seed: int, rows: int) -> Batch:
    return {"input_ids": _tokens(seed, rows), "labels": _tokens(seed + 1, rows)}


def _images(seed: int, rows: int) -> Batch:
    return {
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=_generator(seed)),
        "labels": torch.randint(3, (rows,), generator=_generator(seed + 1)),
    }


def _speech(seed: int, rows: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 16, generator=_generator(seed)), "labels": _tokens(seed + 1, rows)}


def _pairs(seed: int, rows: int) -> Batch:
    tokens = _tokens(seed, rows)
    tokens[:, -1] = VOCABULARY - 1  # the end of the text, where CLIP reads its embedding
    return {"input_ids": tokens, "pixel_values": _images(seed, rows)["pixel_values"]}


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_CLIP_TOWER = {key: _ENCODER[key] for key in list(_ENCODER)[:4]} | {"projection_dim": 12}


def _of(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return WithLoss(getattr(transformers, model)(getattr(transformers, config)(**options)))

    return build


def _clip() -> nn.Module:
    import transformers

    text = _CLIP_TOWER | {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = _CLIP_TOWER | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    return PairsOfClip(transformers.CLIPModel(config))


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model with its data."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """``batch(seed, rows)``: the keyword arguments of a forward."""

    def model(self) -> nn.Module:
        """A fresh model in training mode, the same each time."""
        torch.manual_seed(7)
        return self.build().train()


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        build=_of(
            "GPT2Config",
            "GPT2LMHeadModel",
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        batch=_text,
    ),
    "llama": Architecture(build=_of("LlamaConfig", "LlamaForCausalLM", **_DECODER), batch=_text),
    "qwen2": Architecture(
        build=_of("Qwen2Config", "Qwen2ForCausalLM", tie_word_embeddings=True, **_DECODER), batch=_text
    ),
    "qwen3": Architecture(build=_of("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **_DECODER), batch=_text),
    "mixtral": Architecture(
        build=_of("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, **_DECODER),
        batch=_text,
    ),
    "t5": Architecture(
        build=_of(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        batch=_translation,
    ),
    "bert": Architecture(
        build=_of("BertConfig", "BertForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=32, **_ENCODER),
        batch=_text,
    ),
    "vit": Architecture(
        build=_of("ViTConfig", "ViTForImageClassification", image_size=8, patch_size=4, num_labels=3, **_ENCODER),
        batch=_images,
    ),
    "whisper": Architecture(
        build=_of(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=8,
            max_target_positions=32,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        batch=_speech,
    ),
    "clip": Architecture(build=_clip, batch=_pairs),
    "mamba": Architecture(
        build=_of(
            "MambaConfig",
            "MambaForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            time_step_rank=2,
            bos_token_id=1,
            eos_token_id=2,
        ),
        batch=_text,
    ),
}
