"""``load_state_dict`` in unsharded names, and the optimizer's own state."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import shardcore as sc
from shardcore.errors import CheckpointError, ConfigError, RankMismatchError, StateError
from shardcore.testing import spmd
from zero.following import rows
from zero.models import Perceptron, Tied

all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Buffered(Perceptron):
    """A frozen block, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def build(stage: int, cls: type[nn.Module] = Buffered, seed: int = 1, precision: str = "fp32") -> nn.Module:
    torch.manual_seed(seed)
    return sc.shard(cls(), stage=stage, precision=sc.Precision(param=precision))


def other_weights(cls: type[nn.Module] = Buffered) -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    state = cls().state_dict()
    return {name: v + 5 if v.dtype == torch.int64 else v for name, v in state.items()}


def assert_loaded(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    found = sc.state_dict(model, rank0_only=False)
    assert found.keys() == weights.keys()
    for name, value in found.items():
        assert torch.equal(value, weights[name].to(value.dtype)), name


@all_stages
@spmd(world=2)
def test_every_rank_gets_the_buffers_of_the_first(stage: int) -> None:
    """Each rank's running statistics are its own; a state that every rank loads must not carry that on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("nothing", torch.zeros(0))
    model.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
    sc.shard(model, stage=stage)
    rank = sc.Mesh(device="cpu").rank
    with torch.no_grad():
        model(rows(0, rank, 8, 3))
    model.flags.fill_(rank == 0)
    own = model[1].running_mean.clone()
    state = sc.state_dict(model, rank0_only=False)
    model.load_state_dict(state)
    assert bool(state["flags"].all())
    assert torch.equal(model[1].running_mean, own) == (rank == 0)
    means = [torch.empty(4) for _ in range(2)]
    torch.distributed.all_gather(means, model[1].running_mean)
    assert torch.equal(means[0], means[1])


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rank0_only", [False, True])
@spmd(world=2)
def test_whole_weights_into_a_sharded_model(stage: int, precision: str, rank0_only: bool) -> None:
    for cls in (Buffered, Tied):
        model = build(stage, cls, precision=precision)
        weights = other_weights(cls)
        given = weights if not rank0_only or sc.Mesh().rank == 0 else {}
        result = sc.load_state_dict(model, given, rank0_only=rank0_only)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_loaded(model, weights)
        for name, param in model.named_parameters():
            master = sc.zero.full_master(param)
            assert master is None or torch.equal(master, weights[name]), "masters take the values unrounded"


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@spmd(world=2)
def test_torchs_own_load_state_dict(stage: int, precision: str) -> None:
    """Of the model, of a part of it, and of a wrapper; between steps, with masters that follow."""
    model = build(stage, precision=precision)
    optimizer = sc.optimizer(torch.optim.SGD, model, lr=0.0)
    weights = other_weights()
    assert model.load_state_dict(weights).missing_keys == []
    assert_loaded(model, weights)
    model(rows(0, 0, 4, 7)).float().mean().backward()
    optimizer.step()
    assert_loaded(model, weights)
    model.head.load_state_dict({"weight": torch.full((3, 7), 2.0), "bias": torch.full((3,), 3.0)})
    weights |= {"head.weight": torch.full((3, 7), 2.0), "head.bias": torch.full((3,), 3.0)}
    assert_loaded(model, weights)
    wrapper = nn.ModuleDict({"inner": model})
    wrapper.load_state_dict({f"inner.{name}": value for name, value in other_weights().items()})
    assert_loaded(model, other_weights())
    master = sc.zero.full_master(model.gain)
    assert master is not None
    assert torch.equal(master, other_weights()["gain"])


@all_stages
@spmd(world=2)
def test_torchs_own_load_state_dict_reports_as_torch_does(stage: int) -> None:
    model = build(stage)
    weights = other_weights()
    weights["extra"] = weights.pop("gain")
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"gain".*Unexpected key.*"extra"'):
        model.load_state_dict(weights)
    result = model.load_state_dict(weights, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["gain"], ["extra"])
    with pytest.raises(RuntimeError, match="size mismatch for gain"):
        model.load_state_dict({"gain": torch.ones(2)}, strict=False)
    with pytest.raises((RuntimeError, StateError), match="assign"):
        model.load_state_dict(other_weights(), assign=True)
    if stage == 3:
        with pytest.raises(StateError, match="summon"), torch.no_grad():
            model.gain.copy_(torch.ones(1))


@all_stages
@pytest.mark.parametrize("rank0_only", [False, True])
@spmd(world=2)
def test_g6_everything_that_does_not_fit_is_told_at_once_on_every_rank(stage: int, rank0_only: bool) -> None:
    model = build(stage)
    before = sc.state_dict(model, rank0_only=False)
    weights = other_weights()
    weights["extra"] = weights.pop("gain")
    weights["head.weight"] = torch.ones(7, 3)
    given = weights if not rank0_only or sc.Mesh().rank == 0 else {}
    wrong = r"missing: gain; unexpected: extra; head\.weight: shape \(7, 3\), the model has \(3, 7\)"
    with pytest.raises(CheckpointError, match=wrong) as failure:
        sc.load_state_dict(model, given, rank0_only=rank0_only)
    assert isinstance(failure.value, RuntimeError)
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        sc.load_state_dict(model, given, rank0_only=rank0_only, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in sc.state_dict(model, rank0_only=False).items())
    if given:
        del given["head.weight"]
    result = sc.load_state_dict(model, given, rank0_only=rank0_only, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["gain", "head.weight"], ["extra"])
    after = sc.state_dict(model, rank0_only=False)
    for name, value in after.items():
        assert torch.equal(value, before[name] if name in ("gain", "head.weight") else weights[name])


@all_stages
@spmd(world=2)
def test_a_tied_weight_loads_under_either_name(stage: int) -> None:
    model = build(stage, Tied)
    weights = other_weights(Tied)
    for name in ("embed.weight", "head.weight"):
        partial = {key: value for key, value in weights.items() if key != name}
        assert sc.load_state_dict(model, partial).missing_keys == []
        assert_loaded(model, weights)


@all_stages
@spmd(world=2)
def test_ranks_that_load_different_files(stage: int) -> None:
    model = build(stage)
    weights = other_weights()
    if sc.Mesh().rank == 1:
        weights["gain"] = torch.full((1,), 8.0)
    with pytest.raises(RankMismatchError, match=r"rank 1 .*'gain'"):
        sc.load_state_dict(model, weights)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(rows(step, sc.Mesh().rank, 4, 7)).float().square().mean().backward()
        if step == 1:
            model.gain.grad = None  # from here on this parameter's state stands alone
        optimizer.step()
        optimizer.zero_grad()


@all_stages
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@spmd(world=2)
def test_resuming_is_the_straight_run_to_the_last_bit(stage: int, precision: str) -> None:
    for optimizer_first in (False, True):
        check_resuming(stage, precision, optimizer_first)


def check_resuming(stage: int, precision: str, optimizer_first: bool) -> None:
    """Train, save, train on; and the same from the saved state, loaded in either order."""
    options = {"lr": 1e-2, "weight_decay": 0.1}
    straight = build(stage, precision=precision)
    optimizer = sc.optimizer(torch.optim.AdamW, straight, **options)
    train(straight, optimizer, range(3))
    weights = sc.state_dict(straight, rank0_only=False)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    train(straight, optimizer, range(3, 6))

    resumed = build(stage, seed=5, precision=precision)
    again = sc.optimizer(torch.optim.AdamW, resumed, lr=9.0)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    if optimizer_first:
        again.load_state_dict(saved)
    resumed.load_state_dict(weights)
    if not optimizer_first:
        again.load_state_dict(saved)
    assert again.num_steps + again.num_skipped_steps == 3
    train(resumed, again, range(3, 6))
    expected = sc.state_dict(straight, rank0_only=False)
    for name, value in sc.state_dict(resumed, rank0_only=False).items():
        assert torch.equal(value, expected[name]), name


@spmd(world=2)
def test_the_form_of_an_optimizers_state_is_torchs() -> None:
    model = build(2)
    first, *rest = [param for param in model.parameters() if param.requires_grad]
    optimizer = sc.optimizer(torch.optim.AdamW, [{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.1]
    indices = [i for group in state["param_groups"] for i in group["params"]]
    assert sorted(indices) == sorted(state["state"])
    assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in state["state"].values())


@spmd(world=2)
def test_g29_the_state_of_another_model_is_refused_on_every_rank() -> None:
    model = build(2)
    optimizer = sc.optimizer(torch.optim.AdamW, model, lr=0.1)
    train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    if sc.Mesh().rank == 0:
        state["pieces"][-1] = [*state["pieces"][-1], ("elsewhere", 0, 4)]
    with pytest.raises(ConfigError, match="elsewhere"):
        optimizer.load_state_dict(state)
    with pytest.raises(ConfigError, match="parameter groups"):
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": []})
    with pytest.raises(ConfigError, match="lacks param_groups, pieces, state"):
        optimizer.load_state_dict({})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("differs", ["rank 0 alone", "other values"])
@spmd(world=2)
def test_torchs_load_state_dict_on_ranks_that_differ_is_an_error_on_all(stage: int, differs: str) -> None:
    model = sc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage=stage)
    optim = sc.optimizer("sgd", model, lr=0.1)
    rank = sc.Mesh().rank
    weights = {name: torch.full(param.shape, float(rank)) for name, param in model.named_parameters()}
    if rank == 0 or differs == "other values":
        model.load_state_dict(weights)

    def train() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optim.step()

    with pytest.raises(RankMismatchError, match="load_state_dict of 0"):
        train()
