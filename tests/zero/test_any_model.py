"""Every kind of model trains as in one process, or is refused with a clear error. Kinds not here stand in
test_autograd_traps.py, test_gradients.py, test_between_steps.py and test_branches.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardcore as sc
from shardcore.errors import ConfigError, StateError
from shardcore.protocols import find_root
from shardcore.testing import spmd, zoo
from zero.architectures import ARCHITECTURES, VOCABULARY
from zero.following import check_follows, rows, seeded
from zero.models import Block
from zero.twin import whole_parameters

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def play_rows(model: nn.Module, step: int, rank: int) -> None:
    model(rows(step, rank, 4, 7)).square().mean().backward()


@all_stages
@spmd(world=2)
def test_every_model_of_the_zoo(stage: int) -> None:
    """Odd sizes, size 0, no dims, frozen, unused, tied, several dtypes, convolutions, nested outputs."""
    for name in zoo.names():

        def play(model: nn.Module, step: int, rank: int, name: str = name) -> None:
            zoo.loss(model, zoo.rank_slice(zoo.batch(name, step, 4), rank, 2)).backward()

        # Rounding of bf16 gradients, once per rank.
        tolerance = 2e-2 if name == "mixed_dtype" else 1e-6
        check_follows(lambda name=name: zoo.build(name), play, stage=stage, steps=2, tolerance=tolerance)


class Lora(nn.Module):
    """A frozen layer with a trained low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 3)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def adapted() -> nn.Module:
    """Blocks whose linear layers are adapted and all else is frozen; a head and its trained copy."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "head": nn.Linear(7, 3)})
    model.requires_grad_(False)
    for block in model["blocks"]:
        block.up, block.down = Lora(block.up), Lora(block.down)
    model["trained_head"] = nn.Linear(7, 3)
    return AdaptedModel(model)


class AdaptedModel(nn.Module):
    """Runs the parts of :func:`adapted`."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.parts["blocks"]:
            x = block(x)
        return self.parts["head"](x) + self.parts["trained_head"](x)


@all_stages
@spmd(world=2)
def test_c17_adapters_train_beside_frozen_weights_and_are_saved_whole(stage: int) -> None:
    model = check_follows(adapted, play_rows, stage=stage)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    state = sc.state_dict(model)  # every rank takes part; rank 0 has the result
    found, start = whole_parameters(model), dict(seeded(adapted).named_parameters())
    if sc.Mesh().rank == 0:
        assert all(state[name].shape == start[name].shape and torch.equal(state[name], found[name]) for name in names)
    for name, param in found.items():
        assert torch.equal(param, start[name]) != start[name].requires_grad, name


@pytest.mark.parametrize("stage", [2, 3])
@spmd(world=2)
def test_peft_adapters(stage: int) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(ARCHITECTURES["llama"].model().model, options)  # type: ignore[no-any-return]

    def play(model: nn.Module, step: int, rank: int) -> None:
        model(**ARCHITECTURES["llama"].batch(10 * step + rank, 2)).loss.backward()

    check_follows(build, play, stage=stage)


class Views(nn.Module):
    """Parameters that are transposed, strided, and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.strided = nn.Parameter(torch.randn(10)[::2])
        self.expanded = nn.Parameter(torch.ones(1).expand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.transposed * self.strided + self.expanded


def dense_views() -> nn.Module:
    """The same values, each in memory of its own: torch cannot update an expanded parameter."""
    model = Views()
    for param in model.parameters():
        param.data = param.data.clone(memory_format=torch.contiguous_format)
    return model


@all_stages
@spmd(world=2)
def test_parameters_that_are_not_contiguous_or_expanded(stage: int) -> None:
    mesh = sc.Mesh()
    model, dense = sc.shard(seeded(Views), mesh, stage=stage), sc.shard(seeded(dense_views), mesh, stage=stage)
    for each in (model, dense):
        optimizer = sc.optimizer(torch.optim.SGD, each, lr=0.1)
        for step in range(2):
            play_rows(each, step, mesh.rank)
            optimizer.step()
            optimizer.zero_grad()
    found = whole_parameters(model)
    assert {name: tuple(p.shape) for name, p in found.items()} == {
        "transposed": (7, 5),
        "strided": (5,),
        "expanded": (5,),
    }
    assert all(torch.equal(found[name], p) for name, p in whole_parameters(dense).items())
    check_follows(dense_views, play_rows, stage=stage)


class Outer(nn.Module):
    """A unit with a unit inside that has a unit inside, and parameters at each level."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((7,), 1.5))
        self.inner = Outer(depth - 1) if depth else Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale) + self.scale


@all_stages
@spmd(world=2)
def test_units_nested_in_units(stage: int) -> None:
    check_follows(lambda: nn.Sequential(Outer(2), Outer(1)), play_rows, stage=stage, units=[Outer, Block])


class Pair(NamedTuple):
    first: torch.Tensor
    rest: dict[str, Any]


class Holder:
    """An object that is no container."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Speaker(nn.Module):
    """Hands its result on in the shape that is asked for."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.block = Block()
        self.shape = shape

    def forward(self, given: Any) -> Any:
        x = given if isinstance(given, torch.Tensor) else heard(given)
        y = self.block(x)
        match self.shape:
            case "namedtuple":
                return Pair(y, {"unused": None})
            case "list":
                return [y, [y.detach()], 3]
            case "object":
                return Holder(y)
            case "model output":
                from transformers.modeling_outputs import BaseModelOutput

                return BaseModelOutput(last_hidden_state=y)
        return {"deep": ({"er": y},)}


def heard(given: Any) -> torch.Tensor:
    """The tensor in any of these."""
    if isinstance(given, Pair | list):
        return given[0]  # type: ignore[return-value]
    if isinstance(given, Holder):
        return given.value
    return given["deep"][0]["er"] if "deep" in given else given["last_hidden_state"]


@pytest.mark.parametrize("stage", [2, 3])
@spmd(world=2)
def test_outputs_of_every_shape(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        heard(model(rows(step, rank, 4, 7).requires_grad_())).square().mean().backward()

    for shape in ("dict", "namedtuple", "list", "object", "model output"):
        check_follows(lambda shape=shape: nn.Sequential(Speaker(shape), Speaker(shape)), play, stage=stage, steps=2)


class Sides(nn.Module):
    """Two embeddings, one shared by encoder and decoder, and a head that is the shared one scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 7)
        self.encoder = nn.ModuleDict({"embed": self.shared, "block": Block()})
        self.decoder = nn.ModuleDict({"embed": self.shared, "block": Block()})
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.encoder["block"](self.encoder["embed"](tokens))
        return self.head(self.decoder["block"](self.decoder["embed"](tokens) + memory) * 7**-0.5)


@all_stages
@spmd(world=2)
def test_c27_tied_weights_in_separate_units_stay_one(stage: int) -> None:
    def play(model: nn.Module, step: int, rank: int) -> None:
        tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    model = check_follows(Sides, play, stage=stage, units=[nn.Embedding, Block, nn.Linear], steps=5)
    assert model.head.weight is model.shared.weight
    state = sc.state_dict(model, rank0_only=False)
    assert torch.equal(state["head.weight"], state["decoder.embed.weight"])
    assert {"shared.weight", "encoder.embed.weight", "decoder.embed.weight", "head.weight"} <= state.keys()


# ------------------------------------------------------------------------------------------------- generate, compile


def generated(model: nn.Module, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(tokens, do_sample=False, pad_token_id=0, **options)  # type: ignore[operator]


def language_model() -> nn.Module:
    return ARCHITECTURES["llama"].model().model  # type: ignore[return-value]


@pytest.mark.parametrize("lengths", [(4, 4), (2, 6)], ids=["same", "different"])
@pytest.mark.parametrize("stage", [1, 3])
@spmd(world=2)
def test_generate_gives_the_texts_of_one_process_and_training_goes_on(stage: int, lengths: tuple[int, int]) -> None:
    """With different lengths per rank one rank stops while the other goes on generating."""
    mesh = sc.Mesh()
    tokens = torch.randint(3, VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(mesh.rank))
    options: dict[str, Any] = {"max_new_tokens": lengths[mesh.rank], "min_new_tokens": lengths[mesh.rank]}

    def play(model: nn.Module, step: int, rank: int) -> None:
        if find_root(model) is not None:
            text = generated(model.eval(), tokens, **options)
            if step == 0:
                assert torch.equal(text, generated(seeded(language_model).eval(), tokens, **options))
            model.train()
        model(**ARCHITECTURES["llama"].batch(10 * step + rank, 2)).loss.backward()

    check_follows(language_model, play, stage=stage, steps=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's look at its inputs
@spmd(world=2)
def test_c22_compiled_blocks_with_lengths_that_differ_between_ranks() -> None:
    num_graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    def build() -> nn.Module:
        model = nn.Sequential(Block(), Block())
        for block in model:
            block.compile(backend=count)
        return model

    def play(model: nn.Module, step: int, rank: int) -> None:
        lengths = [(5, 9), (9, 5)][step % 2]
        if find_root(model) is None:
            for block in model:  # type: ignore[attr-defined]
                block._compiled_call_impl = None
        model(rows(step, rank, 2, lengths[rank], 7)).square().mean().backward()

    torch._dynamo.reset()
    check_follows(build, play, stage=3, steps=4)
    assert 1 <= num_graphs <= 4, "one graph per length, and no recompilation at each step"


# ------------------------------------------------------------------------------------------------------- torch.func


@all_stages
@spmd(world=2)
def test_functional_call_works_with_any_parameters(stage: int) -> None:
    model, alone = sc.shard(seeded(Views), stage=stage), seeded(Views)
    x = rows(0, sc.Mesh().rank, 4, 7)
    replaced = {name: p.detach() + 1 for name, p in alone.named_parameters()}
    for given in (replaced, dict(model.named_parameters())):
        expected = torch.func.functional_call(alone, replaced, (x,)) if given is replaced else alone(x)
        # A sharded parameter is contiguous, so its product sums in another order than that of a transposed one.
        torch.testing.assert_close(torch.func.functional_call(model, given, (x,)), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp uses it
@all_stages
@spmd(world=2)
def test_transforms_of_torch_func_are_refused_or_right(stage: int) -> None:
    model, alone = sc.shard(seeded(Block), stage=stage), seeded(Block)
    x = rows(0, 0, 4, 7)
    takes_gradients = (
        lambda f: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x),
    )
    for transform in takes_gradients:
        with pytest.raises(StateError, match=r"torch\.func's .*Grad.*unsharded copy"):
            transform(model)
    for transform in (lambda f: torch.func.vmap(f)(x), lambda f: torch.func.jvp(f, (x,), (x,))[1]):
        if stage == 3:
            with pytest.raises(StateError, match=r"torch\.func's (Vmap|Jvp)"):
                transform(model)
        else:
            torch.testing.assert_close(transform(model), transform(alone))
    model(x).sum().backward()  # nothing was left behind
    assert find_root(model).window.num_backwards == 1


@spmd(world=2)
def test_gradients_asked_of_autograd_by_parameter_are_refused_at_stage_3() -> None:
    model = sc.shard(seeded(Block), stage=3)
    with pytest.raises(StateError, match=r"used by 'grad'.*loss\.backward\(\)"):
        torch.autograd.grad(model(rows(0, 0, 4, 7)).sum(), list(model.parameters()))
    with pytest.raises(StateError, match=r"used by 'backward'.*without naming parameters"):
        model(rows(0, 0, 4, 7)).sum().backward(inputs=list(model.parameters()))


@all_stages
@spmd(world=1)
def test_complex_parameters_are_refused_by_name(stage: int) -> None:
    model = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(ConfigError, match=r"'phase' is torch.complex64; only real"):
        sc.shard(model, stage=stage)
