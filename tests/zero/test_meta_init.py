"""Models on the meta device: ``shard`` gives them the values of ``to_empty`` and the same calls, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError
from shardcore.testing import run_spmd, spmd
from zero.built import Gain, Plain, Scaled, assert_equal, empty, hugging_face, sharded, to_empty
from zero.twin import whole_parameters

ARCHITECTURES = ["llama", "gpt2", "t5", "qwen", "mixtral", "bert", "vit", "whisper", "clip", "mamba"]


def check_equals_to_empty(build: Callable[[], nn.Module], stage: int) -> None:
    reference = to_empty(build, 5)
    state = torch.random.get_rng_state()
    model = empty(build)
    before = dict(model.named_parameters(remove_duplicate=False))
    torch.manual_seed(5)
    sharded(model, stage)
    assert torch.equal(torch.random.get_rng_state(), state), "as many random numbers were drawn"
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is param for name, param in before.items()), "parameters keep identity"
    assert_equal(model, reference)


@pytest.mark.parametrize("build", [Plain, Scaled])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (3, 1), (2, 2), (4, 3)])
def test_a_model_of_torchs_modules(build: type[nn.Module], world: int, stage: int) -> None:
    run_spmd(check_equals_to_empty, world, build, stage)


def check_architecture(name: str, stage: int) -> None:
    check_equals_to_empty(hugging_face(name), stage)


@pytest.mark.parametrize(
    ("name", "world", "stage"),
    [
        ("llama", 2, 3),
        ("gpt2", 4, 1),
        ("t5", 2, 3),
        *[
            pytest.param(name, world, stage, marks=pytest.mark.full)
            for name in ARCHITECTURES
            for world, stage in ((1, 3), (2, 0), (2, 2), (4, 3))
        ],
    ],
)
def test_an_architecture_of_hugging_face(name: str, world: int, stage: int) -> None:
    run_spmd(check_architecture, world, name, stage)


@spmd(world=2)
def test_what_an_architecture_of_hugging_face_does_not_initialise_is_named() -> None:
    import transformers

    config = hugging_face("clip")().config
    with pytest.raises(ConfigError, match=r"'logit_scale' of CLIPModel.*shardcore\.empty_init"):
        sharded(empty(lambda: transformers.CLIPModel(config)))


@spmd(world=2)
def test_different_seeds_give_the_first_ranks_values() -> None:
    rank = sc.Mesh().rank
    reference = to_empty(Plain, 0)
    model = empty(Plain)
    torch.manual_seed(rank)
    sharded(model)
    assert_equal(model, reference)


@spmd(world=2)
def test_a_model_of_which_only_a_part_is_on_meta() -> None:
    """What has values keeps them, in the same module too."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), empty(lambda: nn.Linear(4, 4)), nn.Linear(4, 2))
    model[2].bias = nn.Parameter(torch.empty(2, device="meta"))
    kept = {name: p.clone() for name, p in model.named_parameters() if not p.is_meta}
    assert set(kept) == {"0.weight", "0.bias", "2.weight"}
    sharded(model)
    found = whole_parameters(model)
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert all(value.isfinite().all() for value in found.values())


@spmd(world=2)
def test_a_function_initialises_each_module_with_tensors_of_its_own() -> None:
    called: list[str] = []

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, len(called))
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    model = empty(lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(Gain(3)), nn.ReLU()))
    sc.shard(model, init=init)
    assert called == ["Linear", "Gain"]
    found = whole_parameters(model)
    assert found["0.weight"].unique().tolist() == [1.0]
    assert found["1.0.weight"].tolist() == [2.0] * 3
    assert model.get_buffer("1.0.shift").tolist() == [0.0] * 3


@spmd(world=2)
def test_a_frozen_16_bit_model_keeps_dtype_and_trainability() -> None:
    model = empty(lambda: nn.Sequential(nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 2)))
    model[0].requires_grad_(False)
    sc.shard(model)
    assert [(p.dtype, p.requires_grad) for p in model.parameters()] == [
        *[(torch.bfloat16, False)] * 2,
        *[(torch.float32, True)] * 2,
    ]


@spmd(world=2)
def test_the_precision_casts_what_was_initialised_in_fp32() -> None:
    reference = to_empty(Plain, 3).to(torch.bfloat16)
    model = empty(Plain)
    torch.manual_seed(3)
    sc.shard(model, precision=sc.Precision(param="bf16"))
    found = whole_parameters(model)
    assert all(torch.equal(found[name], p) for name, p in reference.named_parameters())


class Bare(nn.Module):
    """Nothing says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.fine = nn.Linear(3, 3)


class Half(nn.Linear):
    """Forgets a part of its weight."""

    def reset_parameters(self) -> None:
        self.weight.data[0].zero_()
        nn.init.zeros_(self.bias)


@pytest.mark.parametrize("world", [1, 2])
def test_what_nothing_initialises_is_named(world: int) -> None:
    run_spmd(check_refusal, world)


def check_refusal() -> None:
    with pytest.raises(ConfigError) as error:
        sc.shard(empty(lambda: nn.Sequential(Bare(), Half(4, 4))))
    text = str(error.value)
    for name in ["parameter '0.gain'", "buffer '0.mask'", "buffer '0.count'", "buffer '0.table'", "'1.weight' of Half"]:
        assert name in text
    assert "'0.fine" not in text
    assert "'1.bias" not in text
    assert "empty_init" in text


@spmd(world=2)
def test_a_function_that_forgets_a_module_is_found_out() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    with pytest.raises(ConfigError, match=r"'1\.weight' of LayerNorm"):
        sc.shard(empty(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))), init=init)


@spmd(world=2)
def test_c15_buffers_of_an_empty_model_are_computed_by_its_constructor() -> None:
    with sc.empty_init():
        model = nn.Sequential(nn.Linear(3, 3), Bare().fine)
        bare = Bare()
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(bare.table, torch.arange(4.0))
    assert bare.mask.all()
    torch.manual_seed(2)
    sc.shard(model)
    assert_equal(model, to_empty(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2))


@spmd(world=2)
def test_an_optimizer_built_on_meta_parameters_trains() -> None:
    """Parameters keep identity, so that groups made before are found again (numerics: order of construction)."""
    model = empty(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    before = torch.optim.SGD(model.parameters(), lr=0.5)
    sharded(model)
    optimizer = sc.optimizer(before, model)
    start = whole_parameters(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(whole_parameters(model)["1.bias"], start["1.bias"])
