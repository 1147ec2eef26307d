"""Models to build in unusual ways, and comparisons with the same model built as usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardcore as sc
from zero.twin import whole_parameters


class Block(nn.Module):
    """Linear, norm and attention, whose parameters torch's own classes initialise."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Gain(nn.Module):
    """A parameter and a buffer of its own, both drawn at random by a method that the constructor calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift


class Plain(nn.Module):
    """Tied embedding and head, blocks, batch statistics, and a prime number of values in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = Gain(8)
        self.odd = nn.Linear(8, 7)
        self.statistics = nn.BatchNorm1d(7)
        self.back = nn.Linear(7, 8, bias=False)
        self.head = nn.Linear(8, 17)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.odd(self.gain(x)).transpose(1, 2)
        return self.head(self.back(self.statistics(x).transpose(1, 2)))


class Scaled(nn.Module):
    """Its method adjusts its children's parameters, after their own have run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)
            self.outer.weight.data.copy_(self.inner.weight[:3] + torch.randn(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


class Base(nn.Module):
    """Three levels of classes, of which each initialises again what the one before has (C8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 4)
        nn.init.ones_(self.a.weight)


class Middle(Base):
    """Adds a parameter between, and draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(3))
        self.b.weight.data.normal_()
        self.a.bias.data = torch.rand(5)


class Derived(Middle):
    """Writes to all of it last, once through an alias taken before other modules were built."""

    def __init__(self) -> None:
        super().__init__()
        alias = self.extra.data
        self.c = nn.Linear(4, 3)
        alias.mul_(3)
        with torch.no_grad():
            self.a.weight.add_(self.b.weight.sum())
            self.c.weight.copy_(self.b.weight[:3, :4])


def reset(module: nn.Module) -> None:
    """A module's own initialisation, as :mod:`shardcore.zero.materialise` finds it."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is not None:
        method()


def empty(build: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        return build()


def to_empty(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The reference of a model on the meta device: ``to_empty`` and the same calls."""
    model = empty(build)
    names = dict(model.named_modules())
    ties: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        ties.setdefault(param, []).append(name)
    model.to_empty(device="cpu")
    for first, *others in ties.values():  # to_empty makes new parameters, each name its own
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(names[owner], attribute, model.get_parameter(first))
    torch.manual_seed(seed)
    with torch.no_grad():
        if hasattr(model, "initialize_weights"):
            model.initialize_weights()
        else:
            model.apply(reset)
    return model


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    """Parameters, ties and buffers of a sharded model are the reference's, to the last bit."""
    found = whole_parameters(model)
    expected = dict(reference.named_parameters())
    assert found.keys() == expected.keys(), "tied parameters must stay tied"
    for name, param in expected.items():
        assert torch.equal(found[name], param), name
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(reference.named_buffers()).keys()
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def hugging_face(name: str) -> Callable[[], nn.Module]:
    """Builds a tiny model of an architecture of ``transformers``, by configuration."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 16}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
    whisper = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "vocab_size": 99,
        "pad_token_id": 0,
    }
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    mamba = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 99}
    clip = {"text_config": {**sizes, "max_position_embeddings": 16}, "vision_config": vision, "projection_dim": 16}
    moe = {**sizes, "num_key_value_heads": 2, "num_local_experts": 4}
    choices: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**sizes, "num_key_value_heads": 2, "tie_word_embeddings": True}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", gpt2),
        "qwen": ("Qwen2ForCausalLM", "Qwen2Config", {**sizes, "num_key_value_heads": 2}),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", moe),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5),
        "bert": ("BertForMaskedLM", "BertConfig", sizes),
        "vit": ("ViTForImageClassification", "ViTConfig", vision),
        "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", whisper),
        "clip": ("CLIPModel", "CLIPConfig", clip),
        "mamba": ("MambaForCausalLM", "MambaConfig", mamba),
    }
    model, config, options = choices[name]
    cls = _fully_initialised_clip() if name == "clip" else getattr(transformers, model)
    return lambda: cls(getattr(transformers, config)(**options))


def _fully_initialised_clip() -> type[nn.Module]:
    """CLIP's own initialisation leaves out ``logit_scale``, whose value its constructor computes."""
    import transformers

    class FullyInitialised(transformers.CLIPModel):
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if module is self:
                nn.init.constant_(module.logit_scale, self.config.logit_scale_init_value)

    return FullyInitialised


def sharded(model: nn.Module, stage: int = 3) -> nn.Module:
    """``sc.shard`` over all ranks."""
    return sc.shard(model, stage=stage)
