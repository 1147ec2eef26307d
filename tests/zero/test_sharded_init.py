"""``sharded_init``: built in pieces, a model is to the last bit the one that is built whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shardcore as sc
from shardcore.errors import ConfigError, RankMismatchError
from shardcore.testing import run_spmd, spmd
from zero.built import Derived, Gain, Plain, Scaled, assert_equal, hugging_face, reset, sharded
from zero.twin import whole_parameters


def check_equals_eager(build: Callable[[], nn.Module], stage: int) -> None:
    torch.manual_seed(5)
    reference = build()
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    with sc.sharded_init():
        model = build()
    assert torch.equal(torch.random.get_rng_state(), state), "as many random numbers were drawn"
    if sc.Mesh().world > 1:
        assert sum(param.untyped_storage().nbytes() for param in list(plain(model))) == 0
    sharded(model, stage)
    assert_equal(model, reference)


def plain(model: nn.Module) -> list[torch.Tensor]:
    """The parameters as tensors that read nothing when their storage is looked at."""
    with torch._C.DisableTorchFunctionSubclass():
        return [param.data for param in model.parameters()]


@pytest.mark.parametrize("build", [Plain, Scaled])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (3, 1), (2, 2), (4, 3)])
def test_a_model_of_torchs_modules(build: type[nn.Module], world: int, stage: int) -> None:
    """U10: whatever the stage."""
    run_spmd(check_equals_eager, world, build, stage)


def check_architecture(name: str, stage: int) -> None:
    check_equals_eager(hugging_face(name), stage)


@pytest.mark.parametrize(
    ("name", "world", "stage"),
    [
        ("llama", 4, 3),
        ("gpt2", 2, 3),
        *[
            pytest.param(name, world, stage, marks=pytest.mark.full)
            for name in ["llama", "gpt2", "qwen", "mixtral", "t5", "bert", "vit", "whisper", "clip", "mamba"]
            for world, stage in ((2, 1), (4, 3))
        ],
    ],
)
def test_an_architecture_of_hugging_face(name: str, world: int, stage: int) -> None:
    run_spmd(check_architecture, world, name, stage)


@spmd(world=2)
def test_c8_initialisation_in_subclasses_and_after_construction() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.3)

    models = []
    for context in (None, sc.sharded_init):
        torch.manual_seed(4)
        if context is None:
            model = Derived()
            model.apply(init)
        else:
            with context():
                model = Derived()
                model.a.apply(init)
            model.b.apply(init)
            model.c.apply(init)
        models.append(model)
    assert_equal(sharded(models[1]), models[0])


@spmd(world=2)
def test_c9_nested_contexts_and_an_exception_in_a_constructor() -> None:
    original = nn.Module.__init__

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), sc.sharded_init(), sc.sharded_init():
        Broken()
    assert nn.Module.__init__ is original
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(1)
    with sc.sharded_init():
        first = nn.Linear(3, 3)
        with sc.sharded_init():
            second = nn.Linear(3, 3)
        model = nn.Sequential(first, second, nn.Linear(3, 3))
    assert nn.Module.__init__ is original
    assert nn.Linear(2, 2).weight.untyped_storage().nbytes() == 16, "outside, nothing happens"
    assert_equal(sharded(model), reference)


@spmd(world=2)
def test_c23_shapes_are_those_of_the_whole_parameters() -> None:
    torch.manual_seed(0)
    reference = Plain()
    with sc.sharded_init():
        model = Plain()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert (param.shape, param.ndim, param.numel()) == (expected.shape, expected.ndim, expected.numel())
        assert (param.dtype, param.requires_grad, param.is_leaf) == (expected.dtype, True, True)
    matrices = [name for name, p in model.named_parameters() if p.ndim >= 2]
    assert matrices == [name for name, p in reference.named_parameters() if p.ndim >= 2]
    assert "in pieces" in repr(model.embed.weight)


@spmd(world=3)
def test_uses_before_sharding_see_whole_values() -> None:
    """A forward and backward, a copy, a state dict, a cast: as with the eager model, and then it is sharded."""
    torch.manual_seed(2)
    reference = Plain().eval()
    torch.manual_seed(2)
    with sc.sharded_init():
        model = Plain().eval()
    tokens = torch.arange(12).view(2, 6)
    out = model(tokens)
    assert torch.equal(out, reference(tokens))
    out.sum().backward()
    reference(tokens).sum().backward()
    assert torch.equal(model.back.weight.grad, reference.back.weight.grad)
    assert torch.equal(copy.deepcopy(model.odd.weight), reference.odd.weight)
    assert type(copy.deepcopy(model).blocks[0].up.weight) is nn.Parameter
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
    assert_equal(sharded(model.double()), reference.double())


class Recording(nn.Module):
    """Its constructor records a graph over a parameter, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.product = (self.weight * self.weight).sum()
        self.other = nn.Linear(2, 2)


@spmd(world=2)
def test_what_a_graph_has_saved_stays() -> None:
    with sc.sharded_init():
        model = Recording()
        nn.Linear(3, 3)
        for _ in range(2):
            model.other.weight.sum()
        model.product.backward()
    assert torch.equal(model.weight.grad, 2 * model.weight)
    del model.product
    sharded(model)


@spmd(world=2)
def test_edits_through_aliases_and_addresses() -> None:
    """Memory that something else shows is not taken away."""
    with sc.sharded_init():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        alias = model[0].weight.data
        address = model[1].weight.data_ptr()
        other = nn.Linear(3, 3)
        model.append(other)
        alias.fill_(7)
    assert model[1].weight.data_ptr() == address
    sharded(model)
    assert whole_parameters(model)["0.weight"].unique().tolist() == [7.0]


@spmd(world=2)
def test_the_first_ranks_values_count() -> None:
    torch.manual_seed(0)
    reference = Gain(7)
    torch.manual_seed(sc.Mesh().rank)
    with sc.sharded_init():
        model = Gain(7)
    sharded(model)
    assert_equal(model, reference)


@spmd(world=2)
def test_unusual_parameters() -> None:
    """Sizes 0, 1 and below the number of ranks, transposed, shared memory, integers, several dtypes."""

    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0))
            self.one = nn.Parameter(torch.randn(1))
            self.scalar = nn.Parameter(torch.randn(()))
            self.turned = nn.Parameter(torch.randn(4, 3).t())
            both = torch.randn(10)
            self.front, self.back = nn.Parameter(both[:5]), nn.Parameter(both[5:])
            self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.child = nn.Linear(2, 2)

    torch.manual_seed(3)
    reference = Unusual()
    torch.manual_seed(3)
    with sc.sharded_init():
        model = Unusual()
    assert_equal(sharded(model), reference)


@spmd(world=2)
def test_a_dtype_for_all_parameters() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(6)
    reference = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    torch.set_default_dtype(before)
    torch.manual_seed(6)
    with sc.sharded_init(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    assert_equal(sharded(model), reference)
    with pytest.raises(ConfigError, match="floating"), sc.sharded_init(dtype=torch.int8):
        pass


@spmd(world=2)
def test_a_model_built_elsewhere_is_shrunk() -> None:
    torch.manual_seed(1)
    model = Plain()
    model.apply(reset)
    reference = copy.deepcopy(model)
    with sc.sharded_init(module=model):
        pass
    assert sum(param.untyped_storage().nbytes() for param in plain(model)) == 0
    assert_equal(sharded(model), reference)


@spmd(world=2)
def test_a_use_on_one_rank_alone_is_an_error_that_names_it() -> None:
    with sc.sharded_init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    use = model[0].weight.sum if sc.Mesh().rank == 0 else lambda: sharded(model)
    with pytest.raises(RankMismatchError, match=r"Linear\.weight"):
        use()


class Derivations(nn.Module):
    """Parameters that are made of others, which have been sent away by then."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths, self.largest, self.turned = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(5, 5)
        self.frozen = nn.Linear(7, 3)
        parametrizations.weight_norm(self.lengths)
        parametrizations.spectral_norm(self.largest)
        parametrizations.orthogonal(self.turned)
        self.frozen.weight = nn.Parameter(self.frozen.weight, requires_grad=False)
        self.last = parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.lengths(self.turned(x)) + self.largest(x)))


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (3, 1)])
def test_parameters_made_of_parameters(world: int, stage: int) -> None:
    run_spmd(check_equals_eager, world, Derivations, stage)


@spmd(world=2)
def test_a_parameter_of_another_shows_its_memory() -> None:
    class Special(nn.Parameter):
        pass

    class Direct(nn.Parameter):
        def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Direct:
            return torch.Tensor._make_subclass(cls, data, requires_grad)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        shared = Special(model[0].weight, requires_grad=False)
        assert (type(shared), shared.requires_grad, shared.is_leaf) == (Special, False, True)
        assert vars(shared) == {}
        nn.Linear(2, 2)
        direct = Direct(model[1].weight)
        assert type(direct) is Direct
        assert torch.equal(direct, model[1].weight)
        nn.Linear(2, 2)
        model[1].weight = nn.Parameter(model[0].weight)
        assert type(model[0].weight) is type(model[1].weight) is nn.Parameter
        with torch.no_grad():
            model[1].weight.fill_(3)
        assert torch.equal(model[0].weight, shared)
        return model

    build()
    with sc.sharded_init():
        model = build()
    assert model[0].weight.unique().tolist() == [3.0]
    with pytest.raises(ConfigError, match="share memory"):  # as of the model that was built without the context
        sharded(model)


def check_training(build: Callable[[], nn.Module], inputs: list[torch.Tensor]) -> None:
    models = []
    for context in (nullcontext, sc.sharded_init):
        torch.manual_seed(8)
        with context():
            model = build()
        sharded(model)
        optimizer = sc.optimizer(torch.optim.AdamW, model, lr=1e-2)
        for batch in inputs:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(whole_parameters(model))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_training_equals_the_eager_models() -> None:
    run_spmd(check_training, 2, Plain, [(torch.arange(12).view(2, 6) + step) % 17 for step in range(2)])


def test_training_with_parameters_made_of_parameters() -> None:
    run_spmd(check_training, 2, Derivations, [torch.randn(4, 5) for _ in range(2)])
