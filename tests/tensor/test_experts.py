"""Experts over the expert axis and the tensor axis, against one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardcore as sc
from shardcore.errors import CheckpointError, ConfigError, StateError
from shardcore.protocols import find_experts, part_of_whole
from shardcore.tensor import MixtureOfExperts
from shardcore.testing import spmd
from tensor.following import assert_follows
from tensor.hugging_face import batch, build, loss

FEATURES, HIDDEN, EXPERTS, CHOSEN = 6, 10, 8, 3


class Dense(nn.Module):
    """The plain twin: every expert in turn, on the tokens that chose it."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.router = nn.Parameter(like["router.weight"].clone())
        self.into = nn.Parameter(like["experts.gate_up_proj"].clone())
        self.out = nn.Parameter(like["experts.down_proj"].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, features] to the same."""
        best, chosen = (x @ self.router.t()).topk(CHOSEN, dim=-1)
        weights, total = best.softmax(-1), torch.zeros_like(x)
        for expert in range(self.into.shape[0]):
            token, place = torch.where(chosen == expert)
            gate, up = (x[token] @ self.into[expert].t()).chunk(2, -1)
            y = (F.silu(gate) * up) @ self.out[expert].t() * weights[token, place, None]
            total = total.index_add(0, token, y)
        return total


def tokens_of(rank: int, kind: str) -> torch.Tensor:
    """Another number of tokens on each rank; ``alike``, so that most experts get none; or none on the first rank."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + 2 * rank, FEATURES, generator=draw, dtype=torch.float64)
    if kind == "none" and rank == 0:
        return x[:0]
    return x[:1] + 1e-3 * x if kind == "alike" else x


def layer(mesh: sc.Mesh) -> MixtureOfExperts:
    """Built with the same seed on all ranks."""
    torch.manual_seed(0)
    return MixtureOfExperts(FEATURES, HIDDEN, EXPERTS, CHOSEN, mesh, dtype=torch.float64)


def whole_state(mesh: sc.Mesh) -> dict[str, torch.Tensor]:
    """What :func:`layer` starts from, in full."""
    torch.manual_seed(0)
    router = nn.Linear(FEATURES, EXPERTS, bias=False, dtype=torch.float64).weight.detach()
    into = torch.empty(EXPERTS, 2 * HIDDEN, FEATURES, dtype=torch.float64).uniform_(-(FEATURES**-0.5), FEATURES**-0.5)
    out = torch.empty(EXPERTS, FEATURES, HIDDEN, dtype=torch.float64).uniform_(-(HIDDEN**-0.5), HIDDEN**-0.5)
    return {"router.weight": router, "experts.gate_up_proj": into, "experts.down_proj": out}


@pytest.mark.parametrize("kind", ["usual", "alike", "none"])
@pytest.mark.parametrize(("world", "sizes"), [(2, {"ep": 2}), (2, {"tp": 2}), (4, {"ep": 2, "tp": 2}), (4, {"ep": 4})])
def test_forward_and_gradients_are_those_of_the_dense_twin(world: int, sizes: dict[str, int], kind: str) -> None:
    sc.testing.run_spmd(check_twin, world, sizes, kind)


def check_twin(sizes: dict[str, int], kind: str) -> None:
    mesh = sc.Mesh(**sizes)
    split, dense = layer(mesh), Dense(whole_state(mesh))
    x = tokens_of(mesh.data_rank, kind).requires_grad_()
    given = torch.randn(x.shape, generator=torch.Generator().manual_seed(9 + mesh.data_rank), dtype=torch.float64)
    split_output = split(x)
    split_output.backward(given)
    mean = {name: torch.zeros_like(param) for name, param in dense.named_parameters()}
    for rank in range(mesh.data_world):
        theirs = tokens_of(rank, kind).requires_grad_()
        each = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(9 + rank), dtype=torch.float64)
        dense.zero_grad()
        output = dense(theirs)
        output.backward(each)
        for name, param in dense.named_parameters():
            mean[name] += param.grad / mesh.data_world
        if rank == mesh.data_rank:
            close(split_output, output)
            close(x.grad, theirs.grad)
            close(split.router.weight.grad, dense.router.grad)
    close(split.experts.gate_up_proj.grad, part_of_whole(split.experts.gate_up_proj, mean["into"]))
    close(split.experts.down_proj.grad, part_of_whole(split.experts.down_proj, mean["out"]))
    assert find_experts(split.experts.down_proj) is None or split.experts.down_proj.shape[0] == EXPERTS // sizes["ep"]
    for name, value in split.state_dict().items():
        assert torch.equal(value, whole_state(mesh)[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=4)
def test_b30_gradients_of_experts_do_not_depend_on_the_expert_axis(stage: int) -> None:
    """All ranks have the same tokens, so that a mean over too few of them, or too many, would show."""
    found, parts = [], {}
    for num_ranks in (1, 2):
        mesh = sc.Mesh(ep=num_ranks)
        split = sc.shard(layer(mesh), mesh, stage=stage)
        split(tokens_of(0, "usual")).square().sum().backward()
        parts = dict(split.named_parameters())
        found.append({name: sc.zero.full_grad(param) for name, param in parts.items()})
    for name, gradient in found[1].items():
        close(gradient, part_of_whole(parts[name], found[0][name]))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Double precision, but for the order of sums."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def assert_model_twin(sizes: dict[str, int], **options: Any) -> None:
    """Mixtral on the ranks' own rows. Its norms and router round to single precision."""
    mesh = sc.Mesh(**sizes)
    whole, split = build("mixtral"), build("mixtral", seed=mesh.rank)
    sc.tensor.parallelize(split, mesh, **options)
    inputs = batch(seed=mesh.data_rank)
    value, expected = loss(split, inputs), loss(whole, inputs)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    value.backward()
    for rank in range(mesh.data_world):
        (loss(whole, batch(seed=rank)) / mesh.data_world).backward()
    found = dict(split.named_parameters())
    for name, param in whole.named_parameters():
        assert torch.equal(found[name], part_of_whole(found[name], param.detach())), name
        if find_experts(found[name]) is not None or mesh.data_world == 1:
            difference = float((found[name].grad - part_of_whole(found[name], param.grad)).abs().max())
            assert difference <= 1e-6 * max(1.0, float(param.grad.abs().max())), name
    report = sc.tensor.report(split)
    assert f"{4 // sizes.get('ep', 1)} on each rank, {34 // sizes.get('tp', 1)} hidden features of each" in report


@spmd(world=2, timeout=110)
def test_mixtral_over_two_expert_ranks() -> None:
    assert_model_twin({"ep": 2})


@pytest.mark.parametrize("sequence", [False, True])
@spmd(world=2, timeout=110)
def test_mixtral_over_two_tensor_ranks(sequence: bool) -> None:
    assert_model_twin({"tp": 2}, sequence=sequence)


@spmd(world=4, timeout=110)
def test_mixtral_over_both_axes() -> None:
    assert_model_twin({"tp": 2, "ep": 2})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@spmd(world=4, timeout=110)
def test_stages_with_two_ranks_for_each_expert(stage: int) -> None:
    """Experts are averaged over the two ranks that hold them, all else over four; the norm counts each element once."""
    assert_follows("mixtral", sc.Mesh(ep=2), stage, clip=0.5, tolerance=1e-6)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("sizes", [{"ep": 2, "tp": 2}, {"ep": 2, "replicate": 2}, {"ep": 4}])
@spmd(world=4, timeout=110)
def test_stages_beside_other_axes(sizes: dict[str, int], stage: int) -> None:
    assert_follows("mixtral", sc.Mesh(**sizes), stage, clip=0.5, tolerance=1e-6)


@spmd(world=2, timeout=110)
def test_recomputed_blocks_send_their_tokens_again() -> None:
    assert_follows("mixtral", sc.Mesh(ep=2), 3, clip=None, tolerance=1e-6, recompute=True)


@pytest.mark.parametrize("stage", [0, 3])
@spmd(world=4, timeout=110)
def test_saving_and_loading_speak_of_all_experts(stage: int) -> None:
    mesh = sc.Mesh(ep=2)
    model, whole = build("mixtral"), build("mixtral", seed=1).state_dict()
    sc.tensor.parallelize(model, mesh)
    sc.shard(model, mesh, stage=stage)
    model.load_state_dict(whole)
    for name, value in sc.state_dict(model, rank0_only=False).items():
        assert torch.equal(value, whole[name]), name
    other = build("mixtral", seed=2).state_dict()
    sc.load_state_dict(model, other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name]), name
    with pytest.raises(CheckpointError, match="the model has"):
        sc.load_state_dict(model, {**other, "model.layers.0.mlp.experts.down_proj": torch.zeros(2, 24, 34)})


@spmd(world=4)
def test_whole_experts_are_written_inside_summon() -> None:
    mesh = sc.Mesh(ep=2)
    model = nn.Sequential(layer(mesh))
    sc.shard(model, mesh, stage=3)
    with sc.summon(model, writeback=True), torch.no_grad():
        model[0].experts.down_proj.fill_(1.0 + mesh["ep"].rank)  # other experts than on the neighbour
    found = model.state_dict()["0.experts.down_proj"]
    assert torch.equal(found[:, 0, 0], torch.tensor([1.0] * 4 + [2.0] * 4, dtype=torch.float64))
    with (
        pytest.raises(ConfigError, match="other ranks hold other experts"),
        sc.zero.gathered(model.parameters(), modifier_rank=0),
    ):
        pass


@spmd(world=4)
def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
    mesh = sc.Mesh(ep=4)
    with pytest.raises(ConfigError, match="6 experts do not divide over the ep=4 ranks"):
        sc.tensor.parallelize(build("mixtral", num_local_experts=6), mesh)
    with pytest.raises(ConfigError, match="6 experts do not divide over the ep=4 ranks"):
        MixtureOfExperts(FEATURES, HIDDEN, 6, 2, mesh)
    with pytest.raises(ConfigError, match="expected 1 to 8 experts"):
        MixtureOfExperts(FEATURES, HIDDEN, 8, 9, mesh)
    with pytest.raises(ConfigError, match="has ep=4, but LlamaForCausalLM has no experts"):
        sc.tensor.parallelize(build("llama"), mesh)
    with pytest.raises(ConfigError, match="no experts that lie over it"):
        sc.shard(build("mixtral"), mesh)
    with pytest.raises(ConfigError, match="ep=4 does not divide the 2 ranks of each copy"):
        sc.Mesh(ep=4, replicate=2)
    model = build("mixtral")
    sc.tensor.parallelize(model, mesh)
    with pytest.raises(ConfigError, match="give both the same mesh"):
        sc.shard(model, sc.Mesh(ep=2))
    with pytest.raises(StateError, match="of which this rank has a part"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(IndexError, match="expert 9 was chosen, expected 0 to 3"):
        model.model.layers[0].mlp.experts(torch.zeros(1, 24).double(), torch.tensor([[9]]), torch.ones(1, 1))


@pytest.mark.parametrize("empty", [False, True])
@spmd(world=2)
def test_experts_that_are_built_in_pieces_are_refused(empty: bool) -> None:
    mesh = sc.Mesh(ep=2)
    with sc.empty_init() if empty else sc.sharded_init(mesh):
        model = nn.Sequential(layer(mesh), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"0\.experts\.gate_up_proj.*build the experts outside of it"):
        sc.shard(model, mesh)


class Unusual(nn.Module):
    """The parameters of experts, and another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(4, 6, 3)), nn.Parameter(torch.randn(4, 3, 3)))
        self.act_fn = F.silu

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, 3] to the same."""
        return torch.stack([self.down_proj[i].sum(0) for i in chosen[:, 0]]) * x


@spmd(world=2)
def test_experts_that_compute_something_else_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Unusual(), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="it does not compute what gated perceptrons do"):
        sc.tensor.parallelize(model, sc.Mesh(ep=2))
    sc.tensor.parallelize(model, sc.Mesh(tp=2), plan={"0": "colwise", "2": "rowwise"})
    assert model[1].down_proj.shape == (4, 3, 3)
    with pytest.raises(ConfigError, match="it does not compute what gated perceptrons do"):
        sc.tensor.parallelize(nn.Sequential(Unusual()), sc.Mesh(tp=2), plan={"0": "experts"})
